"""TrainStep: one training step of a model under a scheme, in three phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partnets
from partbench.peers.schemes import Where, inside, under
from partnets.data.chunks import divided
from partnets.hyper import hyperparameters
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import MAP, ROWS, STORED, partitioned_modules, state_of
from partnets.subnetworks.switch import switch_of
from partnets.utils.modules import frozen

PHASES = ("forward", "backward", "step")
# So small that many steps on random labels hardly change the weights.
LR = 1e-6
MOMENTUM = 0.9


class TrainStep:
    """A parameter update of Eq. 3 for one partition, a dense update, or a hyperparameter update of Eq. 4.

    Parameters outside of partitioned layers are trained too, by a torch optimiser, so that every scheme computes the
    same gradients. (The method forbids this, since they would learn from every chunk; here their cost counts.)

    Args:
        scheme: of partbench.peers.schemes.
        model: a partitioned model, which is not modified.
        x, y: examples and their labels.
        active, update: the active subnetwork and the partition that learns; update=None trains only ψ.
        optimizer: "adam" or "sgd", with momentum; ψ learns by Adam.
    """

    def __init__(
        self, scheme: str, model: nn.Module, x: Tensor, y: Tensor, active: int, update: int | None, optimizer: str
    ) -> None:
        self.model = under(scheme, model, active, update)
        self.scheme, self.active, self.update = scheme, active, update
        self.x, self.y, self.own, self.entered = x, y, None, ExitStack()
        psi = list(hyperparameters(self.model))
        if update is None:
            for parameter in set(self.model.parameters()) - set(psi):
                parameter.requires_grad_(False)
            self.optimizers = [torch.optim.Adam(psi, lr=LR)]
            return
        for parameter in psi:
            parameter.requires_grad_(False)
        owned = {one.parameter for one in partitioned_parameters(self.model)}
        others = [p for p in self.model.parameters() if p.requires_grad and p not in owned]
        # fused is torch's fastest implementation.
        self.optimizers = [dense_optimizer(optimizer, others, LR, fused=True)] if others else []
        if owned:
            with frozen(others):
                self.own = partitioned_optimizer(optimizer, self.model, LR)

    def inside(self, *, masked: bool = True) -> AbstractContextManager:
        """Return the context in which the model computes, forward and backward."""
        return inside(self.scheme, self.model, self.active, self.update, masked=masked)

    def forward(self) -> None:
        self.entered.enter_context(self.inside(masked=False))  # as partnets.step_weights does
        self.loss = F.cross_entropy(self.model(self.x), self.y)

    def backward(self) -> None:
        self.loss.backward()
        del self.loss
        self.entered.close()

    def step(self) -> None:
        """Step the optimisers, then free the gradients."""
        if self.own is not None:
            self.own.step(update=self.update)
            self.own.zero_grad()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def __call__(self) -> None:
        self.forward()
        self.backward()
        self.step()

    def kept(self) -> dict[str, list[Tensor]]:
        """Return the tensors kept between steps: `parameters`, `map`, `defaults`, and the optimisers' `state`.

        Defaults include the places of the entries that subnetworks exchange.
        """
        parts = partitioned_modules(self.model)
        weights = [one for one in (switch_of(self.model).weights if parts else ()) if one.places is not None]
        exchanged = [tensor for one in weights for tensor in (one.places, one.defaults, one.learned)]
        others = [module for module in self.model.modules() if isinstance(module, Where)]
        states = (state for each in (self.own, *self.optimizers) if each for state in each.state.values())

        def buffers(end: str) -> list[Tensor]:
            return [buffer for part in parts for name, buffer in part._buffers.items() if name in names_of(part, end)]

        def names_of(part: nn.Module, end: str) -> list[str]:
            return [name + end for name in (*state_of(part).weights, *state_of(part).vectors)]

        return {
            "parameters": [*self.model.parameters(), *buffers(ROWS)],
            "map": [*buffers(MAP), *(other.ids for other in others)],
            "defaults": [*buffers(STORED), *exchanged, *(other.defaults for other in others)],
            "state": [value for state in states for value in state.values() if isinstance(value, Tensor)],
        }


class OnePass:
    """An iteration of partnets.Trainer(one_pass=True): steps of all partitions and of ψ, on parts of one batch.

    Args:
        model, x, y, optimizer: as in TrainStep.
        proportions: of the partitions, and of the examples for each.
    """

    # The share of examples from which ψ learns.
    FOR_HYPER = 0.2

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, proportions: Sequence[float], optimizer: str) -> None:
        shares = dict(enumerate(proportions, start=1))
        ours = round(self.FOR_HYPER * len(x))
        parts = [(k, k, n) for k, n in divided("batch", len(x) - ours, shares).items()]
        unseen = {k: share for k, share in shares.items() if k > 1}
        parts += [(k - 1, None, n) for k, n in divided("batch for ψ", ours, unseen).items()]
        batches = zip(*(tensor.split([n for *_, n in parts]) for tensor in (x, y)), strict=True)
        self.steps = [
            TrainStep("partkernels", model, *batch, active, update, optimizer)
            for (active, update, _), batch in zip(parts, batches, strict=True)
        ]

    def __call__(self) -> None:
        for step in self.steps:
            step()


def dense_optimizer(
    name: str, parameters: list[nn.Parameter], lr: float, **implementation: bool
) -> torch.optim.Optimizer:
    """Create torch's "adam" or "sgd"; implementation: fused=True or foreach=True."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, **implementation)
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, **implementation)


def partitioned_optimizer(name: str, model: nn.Module, lr: float) -> partnets.optim.PartitionedOptimizer:
    """Create partnets' optimiser of the same name."""
    return partnets.optim.Adam(model, lr=lr) if name == "adam" else partnets.optim.SGD(model, lr=lr, momentum=MOMENTUM)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators within the block, and restore their state afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
