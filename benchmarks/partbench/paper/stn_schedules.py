"""One dropout rate of an LSTM: the results of self-tuning from different starts, and the benefit of a changing rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from partbench.paper.experiment import Claim, Experiment, Record, Table, lower, registered, select, text
from partbench.paper.stn_lstm import RATES, documentation_parts, windows
from partbench.paper.tuning import SHOWN, Task, Tuner, trajectories
from partnets import hyper
from partnets.utils.seeds import derived

STARTS = (0.05, 0.5, 0.85)
FIXED = (0.1, 0.3, 0.5, 0.7, 0.85)
# The talk's noise: its standard deviation, the sinusoid's amplitude, and its period in steps.
DEVIATION, AMPLITUDE, PERIOD = 0.05, 0.1, 1200
LEAST, MOST = 0.0, 0.89
STEPS, QUICK_STEPS = 1000, 40
# Learning rate of the unconstrained dropout rate; the ends of the range are some 300 steps apart.
HYPER_LR = 3e-2
METHODS = {"stn": "STN", "delta": "Δ-STN"}
LABELS = {
    "fixed": f"the best of {len(FIXED)} rates, fixed",
    "gaussian": "the same with Gaussian noise",
    "sinusoid": "the same with a sinusoid",
    **{method: f"{label} from {STARTS[0]}" for method, label in METHODS.items()},
    **{f"{method} final": f"{label}'s final value, fixed" for method, label in METHODS.items()},
    **{f"{method} schedule": f"trained by {label}'s schedule" for method, label in METHODS.items()},
}
# Largest difference between the final rates from different starts.
APART = 0.15


class OneRate(nn.Module):
    """An LSTM of 128 units with tied embeddings; its only hyperparameter is the dropout rate of its outputs."""

    def __init__(self, words: int, rate: float) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 128)
        nn.init.uniform_(self.table.weight, -0.1, 0.1)
        self.layer = nn.LSTM(128, 128, batch_first=True)
        self.drop = hyper.Dropout(rate, same_along=(1,), range=RATES)
        self.decoder = nn.Linear(128, words)
        self.decoder.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, words, length]."""
        return self.decoder(self.drop(self.layer(self.table(ids))[0])).transpose(1, 2)


def task(seed: int, steps: int, start: float) -> Task:
    parts, words = documentation_parts(seed)
    train, validation, test = map(windows, parts)
    return Task(
        network=lambda: OneRate(words, start),
        train=train,
        validation=validation,
        test=test,
        space={"drop.rate": (LEAST, MOST, False)},
        steps=steps,
        batch_size=20,
        lr=5e-3,
        hyper_lr=HYPER_LR,
        hyper_after=steps // 10,
        clip=0.25,
    )


@registered
class StnSchedules(Experiment):
    """One dropout rate: STN and Δ-STN from three starts, fixed rates, noise around them, final values, schedules."""

    name = "stn-schedules"
    paper = "the talk's hyperparameter schedules"
    datasets = ("documentation",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        common = [{"seed": seed, "steps": QUICK_STEPS if quick else STEPS} for seed in seeds]
        tuned = [
            {**each, "method": method, "start": start} for each in common for method in METHODS for start in STARTS
        ]
        return tuned + [{**each, "method": "fixed", "start": STARTS[0]} for each in common]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        tuner = Tuner(task(setting["seed"], setting["steps"], setting["start"]), setting["seed"], checkpoint)
        return _fixed(tuner) if setting["method"] == "fixed" else _tuned(tuner, setting["method"], setting["start"])

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for method, mine in _by_method(found).items():
            losses = (mine[name].map(math.exp) for name in ("validation", "test"))
            rate = text(mine["rate"], 2) if "rate" in mine else ""
            rows.append([LABELS[method], rate, *(text(each, 1) for each in losses)])
        return ["", "rate at the end", "validation perplexity", "test perplexity"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot the rate over the steps, from each start."""
        figure = Figure(figsize=(9, 4), layout="constrained")
        colours = dict(zip(STARTS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
        for axes, (method, label) in zip(figure.subplots(1, len(METHODS), sharey=True), METHODS.items(), strict=True):
            for start, colour in colours.items():
                for i, (_, run) in enumerate(select(found, method=method, start=start).iterrows()):
                    steps = [run.steps * j / len(run.rates) for j in range(len(run.rates))]
                    axes.plot(steps, run.rates, color=colour, linewidth=1, label=f"from {start}" if i == 0 else None)
            axes.set(xlabel="step", title=label)
        figure.axes[0].set(ylabel="dropout rate")
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims, methods = [], _by_method(found)
        for method, label in METHODS.items():
            ends = select(found, method=method).groupby("seed")["rate"]
            apart = (ends.max() - ends.min()).max()
            claim = f"{label}: all starts end within {APART} of one another, with every seed"
            claims.append(Claim(claim, f"{apart:.2f} apart", bool(apart <= APART)))
            for better, worse in (
                (method, "fixed"),
                (method, f"{method} final"),
                (f"{method} schedule", f"{method} final"),
                (f"{method} final", "fixed"),
                ("gaussian", "fixed"),
            ):
                if (better, method) != ("gaussian", "delta"):
                    ours, theirs = (methods[each].test.map(math.exp) for each in (better, worse))
                    claim = f"{LABELS[better]}: test perplexity below that of {LABELS[worse]}"
                    claims.append(lower(claim, ours, theirs, digits=1))
        return claims


def _tuned(tuner: Tuner, method: str, start: float) -> Record:
    network, history = tuner.self_tuned(centred=method == "delta")
    rates = trajectories(history)["drop.rate"]
    every = max(1, len(rates) // SHOWN)
    record = {**tuner.judged(network), "rate": rates[-1], "rates": [round(rate, 4) for rate in rates[::every]]}
    if start == STARTS[0]:
        record["final"] = tuner.judged(tuner.plain({"drop.rate": rates[-1]}, "final"))
        record["schedule"] = tuner.judged(tuner.plain({}, "schedule", {"drop.rate": rates}))
    return record


def gaussian_noise(seed: int, step: int) -> Tensor:
    """Return the noise of a step, a scalar (MacKay et al. 2019, Section 5.1)."""
    generator = torch.Generator().manual_seed(derived(seed, f"step {step}"))
    return DEVIATION * torch.randn((), generator=generator)


def _fixed(tuner: Tuner) -> Record:
    """Find the best fixed rate by its validation loss, and train with noise around it."""
    tried = {rate: tuner.judged(tuner.plain({"drop.rate": rate}, f"fixed{rate}")) for rate in FIXED}
    best = min(tried, key=lambda rate: tried[rate]["validation"])
    around = {
        "gaussian": lambda step: torch.tensor(best) + gaussian_noise(tuner.seed, step),
        "sinusoid": lambda step: torch.tensor(best) + AMPLITUDE * math.sin(2 * math.pi * step / PERIOD),
    }
    record = {**tried[best], "rate": best, "tried": {str(rate): each["validation"] for rate, each in tried.items()}}
    for name, schedule in around.items():
        rates = [min(max(schedule(step).item(), LEAST), MOST) for step in range(tuner.task.steps)]
        record[name] = tuner.judged(tuner.plain({}, name, {"drop.rate": rates}))
    return record


def _by_method(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the trainings of each row of the table, in its order."""
    methods = {}
    for label in LABELS:
        method, _, kind = label.partition(" ")
        if method in ("gaussian", "sinusoid"):
            method, kind = "fixed", method
        mine = select(found, method=method, start=STARTS[0])
        methods[label] = pd.DataFrame(list(mine[kind])) if kind else mine
    return methods
