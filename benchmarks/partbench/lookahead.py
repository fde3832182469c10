"""Cost of lookahead steps of ψ: time over that of direct steps, and memory over that of a dense training step.

python -m partbench.lookahead
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partnets
from partbench.figures import markdown
from partbench.measuring.clock import WallClock
from partbench.measuring.estimates import passes
from partbench.measuring.peak import of_tensors
from partbench.measuring.timing import Plan, Run, Workload, all_measured
from partbench.peers.layer import CPU, THREE
from partbench.peers.models import NAMED
from partbench.results import Record
from partnets import hyper, optim

MODELS = {"mnist-cnn": 128, "resnet-8": 64, "mlp": 256, "vit-tiny": 32}
SCHEMES = ("weight", "nested")
# Where ψ acts: on the training loss, on a term added to it, or on the inputs.
KINDS = ("smoothing", "decay", "inputs")
# Direct steps learn noise on the inputs, like an augmentation: no other direct ψ needs a whole backward pass.
PEERS = ("dense step", "step of w", "direct", "exact", "differences", "3 steps", "implicit")
BY = {
    "exact": partnets.Lookahead(),
    "differences": partnets.Lookahead(exact=False),
    "3 steps": partnets.Lookahead(3),
    "implicit": partnets.Implicit("neumann", terms=5, alpha=1e-3),
}
PLAN = Plan(passes=3, rounds=3, sample=5e-2, seconds=3.0)


class Noise(hyper.Hyperparameter):
    """Noise on the inputs of a network, in place of an augmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = hyper.Learned(0.1, hyper.positive)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength() * torch.randn_like(x)


@dataclass
class Training:
    """A partitioned model with ψ, its dense twin, their optimisers, and batches."""

    model: nn.Module
    dense: nn.Module
    optimizer: optim.PartitionedOptimizer
    of_dense: torch.optim.Optimizer
    of_psi: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    unseen: tuple[Tensor, Tensor]
    loss: Callable

    @classmethod
    def made(cls, name: str, scheme: str, kind: str, seed: int) -> Training:
        found, size = NAMED[name], MODELS[name]
        torch.manual_seed(seed)
        network, dense = found.make(), found.make()
        x, y = torch.randn(2, size, *found.input), torch.randint(found.classes, (2, size))
        psi = {"smoothing": lambda: hyper.LabelSmoothing(0.1), "decay": lambda: hyper.WeightDecay(network, 1e-3)}
        noise, last = Noise(), psi.get(kind, lambda: hyper.InTraining(Noise()))()
        parts = (noise, last, network) if kind == "inputs" else (noise, network, last)
        model = nn.Sequential(*parts)
        example = {"example": x[0][:2]} if scheme == "nested" else {}
        partnets.partition(model, THREE.proportions, scheme=scheme, **example)
        learning = noise if kind == "direct" else last
        loss = last if kind == "smoothing" else F.cross_entropy
        optimizers = (torch.optim.Adam(each.parameters()) for each in (dense, learning))
        training = cls(model, dense, optim.Adam(model), *optimizers, (x[0], y[0]), (x[1], y[1]), loss)
        training.step()
        training.step_dense()
        return training

    def _loss(self, loss: Callable, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(self.model(batch[0]), batch[1]).mean()

    def step(self) -> None:
        partnets.step_weights(self.model, self.optimizer, 1, self.batch, partial(self._loss, self.loss))

    def step_dense(self) -> None:
        self.of_dense.zero_grad()
        F.cross_entropy(self.dense(self.batch[0]), self.batch[1]).backward()
        self.of_dense.step()

    def step_direct(self) -> None:
        judge = partial(self._loss, F.cross_entropy)
        partnets.step_hyper(self.model, self.of_psi, {2: self.unseen}, judge)

    def step_ahead(self, by: partnets.Lookahead | partnets.Implicit) -> None:
        learn, judge = partial(self._loss, self.loss), partial(self._loss, F.cross_entropy)
        batches = {2: (self.unseen, [self.batch] * by.steps)}
        partnets.step_lookahead(self.model, self.optimizer, self.of_psi, batches, learn, judge, by=by)

    def call(self, peer: str) -> Callable[[], None]:
        plain = {"dense step": self.step_dense, "step of w": self.step, "direct": self.step_direct}
        return plain[peer] if peer in plain else partial(self.step_ahead, BY[peer])


def workload(name: str, scheme: str, kind: str) -> Workload:
    def run(peer: str, training: Training) -> Run:
        own = Training.made(name, scheme, "direct", 0) if peer == "direct" else training
        return Run(own.call(peer), lambda: None)

    case = {"model": NAMED[name].name, "batch": str(MODELS[name]), "scheme": scheme, "ψ": kind}
    return Workload(
        "lookahead", case, partial(Training.made, name, scheme, kind), {p: partial(run, p) for p in PEERS}, {}
    )


def memory(name: str, scheme: str, kind: str) -> dict[str, float]:
    """Return each peer's peak memory over the dense step's, both with weights and the optimiser's moments."""
    training = Training.made(name, scheme, kind, 0)
    direct = Training.made(name, scheme, "direct", 0)
    found = {}
    for peer in PEERS:
        own = direct if peer == "direct" else training
        weights = sum(p.nbytes for p in (own.dense if peer == "dense step" else own.model).parameters())
        found[peer] = 3 * weights + of_tensors(own.call(peer))
    return {peer: bytes / found["dense step"] for peer, bytes in found.items()}


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table of times, with a row for each case and a column for each kind of step in PEERS.

    Each time is the median over passes, divided by that of the direct step. The last column has the time of the direct
    step in milliseconds.
    """
    rows: dict[tuple, dict[str, float]] = {}
    for record in records:
        rows.setdefault(tuple(record.case.values()), {})[record.peer] = median(passes(record.samples))
    cells = [
        [*case, *(f"{times[peer] / times['direct']:.2f}" for peer in PEERS), f"{1e3 * times['direct']:.1f}"]
        for case, times in rows.items()
    ]
    return markdown(("model", "batch", "scheme", "ψ", *PEERS, "direct, ms"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m partbench.lookahead", description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=PLAN.passes, help="over all cases")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cases = [(name, scheme, kind) for name in given.models.split(",") for scheme in SCHEMES for kind in KINDS]
    plan = replace(PLAN, passes=given.passes)
    print("Time over that of a direct step:\n")
    print(table(all_measured([workload(*case) for case in cases], WallClock(CPU, plan.sample), plan)))
    print("\nPeak memory over that of a training step of the dense model, by PyTorch's allocator:\n")
    rows = [[NAMED[case[0]].name, *case[1:], *(f"{x:.2f}" for x in memory(*case).values())] for case in cases]
    print(markdown(("model", "scheme", "ψ", *PEERS), rows))


if __name__ == "__main__":
    main()
