"""Cost of best-response layers: time over torch's layer, and memory kept for the backward pass.

python -m partbench.responses
python -m partbench.responses --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from partbench.figures import figures, markdown
from partbench.measuring.clock import EventClock, WallClock
from partbench.measuring.timing import Plan, Run, Workload, all_measured
from partbench.results import Record
from partnets import hyper, stn

HYPERPARAMETERS = 10
WORKS = ("forward", "forward and backward", "step of the hyperparameters")
PEERS = ("torch", "composed", "each", "one")
LABELS = {"composed": "composed of torch's", "each": "each example its own λ", "one": "one λ a batch"}
PLAN = Plan(passes=6, rounds=12, sample=2e-3, seconds=4.0)


@dataclass(frozen=True)
class Case:
    """A layer of torch and the shape of its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = (
    Case("Linear 1024², 256 examples", partial(nn.Linear, 1024, 1024), (256, 1024)),
    Case("Linear 512², 32 examples of 128", partial(nn.Linear, 512, 512), (32, 128, 512)),
    Case("Conv2d 64², 3x3, 64 images of 32x32", partial(nn.Conv2d, 64, 64, 3, padding=1), (64, 64, 32, 32)),
    Case("Conv2d 64², 3x3, 64 images of 16x16", partial(nn.Conv2d, 64, 64, 3, padding=1), (64, 64, 16, 16)),
    Case("Conv2d 256², 3x3, 64 images of 4x4", partial(nn.Conv2d, 256, 256, 3, padding=1), (64, 256, 4, 4)),
)


class Composed(nn.Module):
    """The same layer in plain PyTorch: W x + b + (V λ) ⊙ W_hyper x + (C λ) ⊙ b_hyper."""

    def __init__(self, layer: stn.HyperLayer) -> None:
        super().__init__()
        self.elementary = layer.dense.__new__(layer.dense)
        self.elementary.__dict__.update(layer.__dict__)
        self.elementary._parameters = {"weight": layer.weight, "bias": layer.bias}
        self.response = layer.dense.__new__(layer.dense)
        self.response.__dict__.update(layer.__dict__)
        self.response._parameters = {"weight": layer.hyper_weight, "bias": None}
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        value = self.layer.vector.input().to(x.dtype)
        places = x.dim() - 2
        is_linear = isinstance(self.layer, nn.Linear)

        def rows(scale: Tensor) -> Tensor:
            found = value @ scale.t()
            return found.view(len(x), *[1] * places, -1) if is_linear else found.view(len(x), -1, *[1] * places)

        offset = rows(self.layer.bias_scale * self.layer.hyper_bias[:, None])
        return self.elementary(x) + rows(self.layer.weight_scale) * self.response(x) + offset


class Setup:
    """A layer, its best-response version, an input and the gradient of the output."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        where = {"device": device, "dtype": dtype}
        dense = case.make().to(**where)
        self.vector = stn.HyperVector(hyper.InputMask(HYPERPARAMETERS).to(device), centred=False)
        layer = copy.deepcopy(dense)
        stn.layer.RULES[type(layer)].convert(layer, self.vector)
        self.x = torch.randn(case.shape, **where, requires_grad=True)
        self.grad = torch.randn_like(dense(self.x))
        self.value = torch.randn(len(self.x), HYPERPARAMETERS, device=device, requires_grad=True)
        self.modules = {"torch": copy.deepcopy(dense), "composed": Composed(layer), "each": layer, "one": layer}

    def at(self, peer: str):
        """Return the context in which a peer computes."""
        if peer == "torch":
            return nullcontext()
        return self.vector.at(self.value[0] if peer == "one" else self.value)

    def call(self, peer: str, work: str) -> Callable[[], object]:
        module = self.modules[peer]
        parameters = list((self.modules["each"] if peer == "composed" else module).parameters())
        learns = [] if peer == "torch" else [self.value]
        wanted = [self.x, *parameters, *learns] if work == "forward and backward" else [self.x, *learns]

        def forward() -> Tensor:
            with self.at(peer):
                return module(self.x)

        def without_autograd() -> Tensor:
            with torch.no_grad():
                return forward()

        def backward() -> tuple[Tensor, ...]:
            # If the hyperparameters learn, the weights are constants.
            for parameter in parameters:
                parameter.requires_grad_(work == "forward and backward")
            return torch.autograd.grad(forward(), wanted, self.grad)

        return without_autograd if work == "forward" else backward

    def check(self, peer: str) -> None:
        with torch.no_grad(), self.at("each" if peer == "composed" else peer):
            expected = self.modules["torch" if peer == "torch" else "composed"]
            if peer != "one":
                most = 1e-3 if self.x.dtype == torch.float32 else 0.1
                torch.testing.assert_close(self.modules[peer](self.x), expected(self.x), rtol=most, atol=most)

    def kept(self, peer: str) -> int:
        """Return the bytes that autograd keeps between the passes, without parameters."""
        parameters = {p.untyped_storage().data_ptr() for p in self.modules["each"].parameters()}
        parameters |= {p.untyped_storage().data_ptr() for p in self.modules["torch"].parameters()}
        found = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), self.at(peer):
            y = self.modules[peer](self.x)
        del y
        return sum(found.values())


def workload(case: Case, work: str, device: str, dtype: torch.dtype) -> Workload:
    def run(peer: str, setup: Setup) -> Run:
        return Run(setup.call(peer, work), partial(setup.check, peer))

    return Workload(
        "responses",
        {"layer": case.name, "work": work},
        partial(Setup, case, device, dtype),
        {peer: partial(run, peer) for peer in PEERS},
    )


def measured(cases: Sequence[Case], device: str, dtype: torch.dtype, plan: Plan = PLAN) -> list[Record]:
    """Return the times of each layer, work and peer."""
    workloads = [workload(case, work, device, dtype) for case in cases for work in WORKS]
    where = torch.device(device)
    clock = EventClock(where) if where.type == "cuda" else WallClock(where, plan.sample)
    return all_measured(workloads, clock, plan)


def kept(case: Case, device: str, dtype: torch.dtype) -> list[float]:
    """Return the bytes that each peer but torch keeps for the backward pass, over torch's."""
    setup = Setup(case, device, dtype, 0)
    return [setup.kept(peer) / setup.kept("torch") for peer in PEERS[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m partbench.responses", description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=PLAN.passes, help="over all cases")
    parser.add_argument("--seconds", type=float, default=PLAN.seconds, help="of a peer in a pass, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    where = given.device, getattr(torch, given.dtype)
    records = measured(CASES, *where, replace(PLAN, passes=given.passes, seconds=given.seconds))
    head = ["time over torch's layer", "work", *LABELS.values()]
    cases = figures(records, "responses").groupby("key", sort=False)
    rows = [[*dict(key).values(), *(f"{ratio:.2f}" for ratio in case.ratio[1:])] for key, case in cases]
    print(markdown(head, rows))
    print()
    head = ["kept for the backward pass, over torch's layer", *LABELS.values()]
    print(markdown(head, [[case.name, *(f"{share:.2f}" for share in kept(case, *where))] for case in CASES]))


if __name__ == "__main__":
    main()
