"""One training step of a model under a scheme: ours by the library's functions, others as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn

import partnets
from partbench.peers.models import loss
from partbench.peers.schemes import Where, inside, under
from partnets.hyper import hyperparameters
from partnets.subnetworks.context import resident
from partnets.subnetworks.state import MAP, ROWS, STORED, partitioned_modules, state_of
from partnets.subnetworks.switch import switch_of

# So small that many steps on random labels hardly change the weights.
LR = 1e-6
MOMENTUM = 0.9


class TrainStep:
    """A step of the weights of one partition (Eq. 3) or of the hyperparameters (Eq. 4), or its dense equivalent.

    The scheme "partkernels" takes partnets.step_weights and partnets.step_hyper, others torch's optimisers.

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
        self.x, self.y = x, y
        psi = list(hyperparameters(self.model))
        weights = [p for p in self.model.parameters() if p.requires_grad and p not in set(psi)]
        self.optimizer: torch.optim.Optimizer
        if update is None:
            self.optimizer = torch.optim.Adam(psi, lr=LR)
        elif scheme == "partkernels":
            self.optimizer = partitioned_optimizer(optimizer, self.model, LR)
        else:
            self.optimizer = dense_optimizer(optimizer, weights, LR, fused=True)  # torch's fastest implementation
        if scheme != "partkernels":
            for parameter in weights if update is None else psi:
                parameter.requires_grad_(False)

    def inside(self) -> AbstractContextManager:
        """Return the context in which the model computes, forward and backward."""
        return inside(self.scheme, self.model, self.active, self.update)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return loss(self.model(x), y)

    def __call__(self) -> None:
        batch = self.x, self.y
        if self.scheme != "partkernels":
            self.loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif self.update is None:
            partnets.step_hyper(self.model, self.optimizer, {self.active + 1: batch}, self.loss)
        else:
            partnets.step_weights(self.model, self.optimizer, self.active, batch, self.loss)

    def kept(self) -> dict[str, list[Tensor]]:
        """Return the tensors kept between steps: `parameters`, `map`, `defaults`, and the optimisers' `state`.

        Defaults include the places of the entries that subnetworks exchange.
        """
        parts = partitioned_modules(self.model)
        weights = [one for one in (switch_of(self.model).weights if parts else ()) if one.places is not None]
        exchanged = [tensor for one in weights for tensor in (one.places, one.defaults, one.learned)]
        others = [module for module in self.model.modules() if isinstance(module, Where)]
        states = self.optimizer.state.values()

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


class Iterations:
    """Iterations of a step of the weights and one of ψ, on batches that are drawn from a data set in memory.

    Args:
        scheme: "dense", or "partkernels" for a partnets.Trainer.
        model: a partitioned model with ψ, which is not modified.
        x, y: the examples and labels of the data set.
        batch: the number of examples in a step.
        proportions: of the chunks.
        optimizer: as in TrainStep.
        one_pass: whether the Trainer updates all partitions in an iteration, each on a part of the batch.
    """

    # The share of a batch from which ψ learns in one pass.
    FOR_HYPER = 0.2

    def __init__(
        self,
        scheme: str,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        batch: int,
        proportions: Sequence[float],
        optimizer: str,
        *,
        one_pass: bool = False,
    ) -> None:
        self.x, self.y, self.batch = x, y, batch
        self.call: Callable[[], None]
        if scheme == "dense":
            last = len(proportions)
            self.steps = [TrainStep("dense", model, x[:1], y[:1], last, update, optimizer) for update in (last, None)]
            self.call = self._dense
            return
        model = under(scheme, model, 1, None)
        psi = [module for module in model.modules() if isinstance(module, partnets.hyper.Hyperparameter)]
        learned = [parameter for module in psi for parameter in module.parameters()]
        for_hyper = round(self.FOR_HYPER * batch) if one_pass else batch
        trainer = partnets.Trainer(
            model,
            partnets.chunk((x, y), proportions),
            hyper=psi,
            loss=loss,
            optimizer=partitioned_optimizer(optimizer, model, LR),
            hyper_optimizer=torch.optim.Adam(learned, lr=LR),
            batch_size=batch - for_hyper if one_pass else batch,
            hyper_batch_size=for_hyper,
            one_pass=one_pass,
            audit=False,
        )
        self.entered = ExitStack()
        self.entered.enter_context(resident(model))  # as in Trainer.fit
        self.call = trainer.step

    def _dense(self) -> None:
        for step in self.steps:
            chosen = torch.randint(len(self.x), (self.batch,))
            step.x, step.y = self.x[chosen], self.y[chosen]
            step()

    def __call__(self) -> None:
        self.call()


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
