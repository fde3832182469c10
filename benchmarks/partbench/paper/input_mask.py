"""Fig. 2b: one run learns which inputs are informative."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import partnets
from partbench import models
from partbench.paper.experiment import Claim, Experiment, Record, Table, registered, select
from partbench.paper.input_selection import BATCH, FEATURES, INFORMATIVE, LR, PRECISION
from partbench.paper.runs import fit
from partbench.paper.toy import input_selection
from partnets import hyper, optim

CHUNKS = 4
PAPER = {"examples": 3000, "proportions": [1 / CHUNKS] * CHUNKS, "steps": 30_000, "hyper_lr": 1e-3}
# With the paper's learning rate, ψ has not converged at the end.
FASTER = {**PAPER, "steps": 15_000, "hyper_lr": 1e-2}
# In finite chunks, some of 15 spurious inputs correlate with the label by chance, alike in early and late chunks, so
# that using them helps on unseen chunks too. The control removes this chance and changes nothing else.
VARIANTS = {
    "uniform chunks": PAPER,
    "ψ ten times faster": FASTER,
    "control: also, ψ on fresh examples": {**FASTER, "fresh": True},
}
QUICK = {**PAPER, "examples": 1000, "steps": 1200, "hyper_lr": 3e-2}
SELECTED, REJECTED = 0.9, 0.1
# Steps between the points of a trajectory in the records.
SHOWN_EVERY = 200


class Endless(partnets.Chunks):
    """Chunks of the toy data that draw new examples for batches of ψ, instead of examples of D_k."""

    def sample(self, k: int, batch_size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        seed = int(torch.randint(2**62, (), generator=generator))
        return input_selection(batch_size, test=2, seed=seed).train


@registered
class InputMask(Experiment):
    """A mask over 30 inputs, of which 15 are informative."""

    name = "input-mask"
    paper = "Fig. 2b"
    datasets = ("synthetic",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        variants = {"quick": QUICK} if quick else VARIANTS
        return [{"variant": name, **setting, "seed": seed} for name, setting in variants.items() for seed in seeds]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data = input_selection(setting["examples"], seed=setting["seed"])
        mask = hyper.InputMask(FEATURES)
        model = nn.Sequential(mask, models.MLP(FEATURES, classes=2))
        partnets.partition(model, setting["proportions"], seed=setting["seed"])
        chunks = partnets.chunk(data.train, setting["proportions"], seed=setting["seed"])
        if setting.get("fresh", False):
            chunks = Endless(chunks.dataset, chunks.order, chunks.sizes)
        trainer = partnets.Trainer(
            model,
            chunks,
            hyper=mask,
            optimizer=optim.Adam(model, lr=LR, weight_decay=optim.decays(PRECISION, chunks.sizes)),
            hyper_optimizer=torch.optim.Adam(mask.parameters(), lr=setting["hyper_lr"]),
            batch_size=BATCH,
            sampling=setting["proportions"],
            seed=setting["seed"],
        )
        history = fit(trainer, setting["steps"], checkpoint)
        trajectories = [[round(p, 4) for p in numbers[::SHOWN_EVERY]] for numbers in history.values.values()]
        accuracy = 100 * partnets.accuracy(model, data.test)
        return {"mask": list(mask.values().values()), "trajectories": trajectories, "test_accuracy": accuracy}

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for variant, seed, mask in zip(found.variant, found.seed, found["mask"], strict=True):
            ours, spurious = mask[:INFORMATIVE], mask[INFORMATIVE:]
            selected = f"{sum(p > SELECTED for p in ours)} of {len(ours)}"
            rejected = f"{sum(p < REJECTED for p in spurious)} of {len(spurious)}"
            rows.append([variant, str(seed), f"{min(ours):.3f}", selected, f"{max(spurious):.3f}", rejected])
        shown = [f"above {SELECTED}", "greatest spurious", f"below {REJECTED}"]
        return ["chunks", "seed", "least informative", *shown], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot the mask over the steps, with a row for each variant and a panel for each run."""
        variants = found.groupby("variant", sort=False)
        count = variants.size().max()
        figure = Figure(figsize=(3.6 * count, 2.3 * len(variants)), layout="constrained")
        panels = figure.subplots(len(variants), count, squeeze=False, sharey=True)
        for row, (variant, runs) in zip(panels, variants, strict=True):
            for axes, (_, run) in zip(row, runs.iterrows(), strict=True):
                extent = (0, run["steps"], FEATURES, 0)
                image = axes.imshow(run["trajectories"], aspect="auto", vmin=0, vmax=1, extent=extent)
                axes.axhline(INFORMATIVE, color="white", linewidth=1)
                axes.set_title(f"{variant}, seed {run['seed']}", size="small")
            row[0].set(ylabel="input")
        for axes in panels[-1]:
            axes.set(xlabel="step")
        figure.colorbar(image, ax=panels, label="probability")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        spurious, claims = FEATURES - INFORMATIVE, []
        for variant in found.variant.unique():
            masks = select(found, variant=variant)["mask"]
            least, greatest = [min(mask[:INFORMATIVE]) for mask in masks], [max(mask[INFORMATIVE:]) for mask in masks]
            kept, dropped = (
                f"all {INFORMATIVE} informative above {SELECTED}",
                f"all {spurious} spurious below {REJECTED}",
            )
            claims.append(Claim(f"{variant}: {kept}", _shown(least), min(least) > SELECTED))
            claims.append(Claim(f"{variant}: {dropped}", _shown(greatest), max(greatest) < REJECTED))
        return claims


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)
