"""Training: one training of a copy of the network at given values, and what data that it has not seen say of it."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from partnets import optim
from partnets.convert import partition
from partnets.data.batch import mean
from partnets.data.chunks import draw_k
from partnets.evaluation.metrics import total_loss
from partnets.evaluation.running_statistics import fresh_statistics
from partnets.hyper import hyperparameters
from partnets.hyper.penalty import penalised
from partnets.nn.batch_norm import heedless_norms
from partnets.nn.live import subnetwork
from partnets.optim.entrywise import arguments
from partnets.training.step import clip_gradient, parameters_of, step_weights
from partnets.tuning.problem import Problem
from partnets.tuning.search import JUDGEMENTS
from partnets.utils import random_state
from partnets.utils.modules import evaluating, frozen, to_device

# The learning rate of what learns by gradient descent, in units of unconstrained parameters.
DIRECT_RATE = 0.05


def due(steps: int, judgements: int = JUDGEMENTS) -> list[int]:
    """Return the steps after which unseen data judge a training.

    Example:
        >>> due(25, 5), due(2)
        ([5, 10, 15, 20, 25], [1, 2])
    """
    return sorted({math.ceil(steps * i / judgements) for i in range(1, judgements + 1)})


class Training:
    """One training of a copy of a problem's network; resumes from its state to the same bits.

    Two chunks: the network trains on D_1, and D_2 judges it. More chunks: the network is partitioned, partition k
    trains on D_1:k, and L_ML judges it. A single chunk: nothing judges it.

    Args:
        problem: what is tuned.
        positions: of each setting in its range, in [0, 1].
        batch_size, steps: of this training; a batch has batch_size examples in the mean, and 1 at least.
        seed: of batches and noise.
        everything: whether it trains on all data and nothing judges it.
        learns: whether modules that learn by gradient descent do so, from unseen data.
        direct: what they have learned before, by the names of parameters.
        unseen: how many of the unseen examples judge it; all if None.
        judgements: how often unseen data judge it, evenly spaced; the last time at its end.

    Attributes:
        network, optimizer, loss: its own, with the settings in them.
        done: the number of steps so far.
        judged: the loss of unseen data in nats, a number for each judgement so far.
        examples: the examples that it has been trained on so far, of unseen data too.
    """

    def __init__(
        self,
        problem: Problem,
        positions: list[float],
        *,
        batch_size: float,
        steps: int,
        seed: int,
        everything: bool = False,
        learns: bool = False,
        direct: dict[str, Tensor] | None = None,
        unseen: int | None = None,
        judgements: int = JUDGEMENTS,
    ) -> None:
        self.problem, self.batch_size, self.steps, self.seed = problem, batch_size, steps, seed
        self.chunks = problem.everything if everything else problem.chunks
        self.done, self.judged, self.examples = 0, [], 0.0
        self.due, self.unseen = due(steps, judgements), unseen
        self.network, self.loss = copy.deepcopy((problem.network, problem.loss))
        self.network.to(problem.device).train()
        for path in problem.still:
            self.network.get_submodule(path).eval()
        psi = set(hyperparameters(self.network))
        for parameter in psi:
            parameter.requires_grad_(False)
        self._load_direct(direct or {})
        weights = [p for p in self.network.parameters() if p.requires_grad and p not in psi]
        self.partitioned = self.chunks.count > 2
        if self.partitioned:
            self.network = partition(self.network, self.chunks.proportions, defaults="stored", seed=seed)
            self.optimizer = _partitioned(problem.optimizer, self.network)
        else:
            self.optimizer = problem.optimizer(weights)
        for setting, position in zip(problem.settings, positions, strict=True):
            setting.put(self, setting.value(position))
        self.judge = problem.judge
        self.direct = self._direct_parameters() if learns else []
        self.direct_optimizer = torch.optim.Adam(self.direct, lr=DIRECT_RATE) if self.direct else None
        self.generator = torch.Generator().manual_seed(seed)
        self.noise: dict | None = None

    @property
    def is_judged(self) -> bool:
        """Whether there are data that judge it."""
        return self.chunks.count > 1

    def run(self, until: int) -> None:
        """Train up to a step, with random states of its own; the caller's are restored.

        A loss that is not finite ends the training; of a judged one the remaining judgements are infinite.

        Raises:
            FloatingPointError: the loss of a training that nothing judges is not finite.
        """
        device = self.problem.device
        with random_state.preserved(device):
            if self.noise is None:
                random_state.seed(self.seed)
                torch.manual_seed(self.seed)
            else:
                random_state.set_state(self.noise, device)
            while self.done < min(until, self.steps):
                if not self._step():
                    break
                if self.is_judged and self.done in self.due:
                    self.judged.append(self._nats())
            self.noise = random_state.get_state(device)

    def _step(self) -> bool:
        k = 1
        if self.partitioned:
            # L_ML reads no partition C, which is therefore not trained.
            k = draw_k([*self.chunks.proportions[:-1], 0.0], self.generator)
        size = max(1, math.floor((self.done + 1) * self.batch_size) - math.floor(self.done * self.batch_size))
        batch = to_device(self.chunks.sample_upto(k, size, self.generator), self.problem.device)
        if self.partitioned:
            loss = step_weights(self.network, self.optimizer, k, batch, self._loss, clip=self.problem.clip)
        else:
            loss = self._step_weights(batch)
        self.done += 1
        self.examples += size
        if not math.isfinite(loss):
            if not self.is_judged:
                raise FloatingPointError(
                    f"the loss is {float(loss)} in step {self.done} of the final training; pass an optimizer with a"
                    " lower learning rate, or clip=1.0."
                )
            missing = sum(step >= self.done for step in self.due)
            self.judged += [math.inf] * missing
            self.done = self.steps
            return False
        if self.direct:
            self._step_direct()
        return True

    def _loss(self, batch: Any) -> Tensor:
        return mean(self.loss, *self.problem.forward(self.network, batch))

    def _step_weights(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        value, total = penalised(self._loss, batch)
        if value.isfinite():
            total.backward()
            clip_gradient(self.optimizer, self.problem.clip)
            self.optimizer.step()
        return value.detach()

    def _step_direct(self) -> None:
        """Step the modules that learn by gradient descent, on unseen data and with fixed weights."""
        size = max(1, round(self.batch_size))
        batch = to_device(self.chunks.sample(2, size, self.generator), self.problem.device)
        self.direct_optimizer.zero_grad()
        with frozen(parameters_of(self.optimizer)), evaluating(*heedless_norms(self.network)):
            mean(self.judge, *self.problem.forward(self.network, batch)).backward()
        self.direct_optimizer.step()
        self.examples += size

    def _nats(self) -> float:
        """Return the loss of unseen data in nats; of a squared error n / 2 log(error).

        Of a partitioned network the loss of each chunk k by subnetwork k - 1 (Eq. 2).
        """
        chunks, share = self.chunks, 1.0
        if self.unseen is not None:
            share = self.unseen / sum(chunks.sizes[1:])
        how = {"batch_size": 256, "forward": self.problem.forward}
        found, count = 0.0, 0
        with fresh_statistics(self.network, chunks, **how) if self.partitioned else nullcontext():
            for k in range(2, chunks.count + 1):
                unseen = Subset(chunks[k], range(max(1, round(share * len(chunks[k])))))
                with subnetwork(self.network, active=k - 1) if self.partitioned else nullcontext():
                    loss, counted = total_loss(
                        self.network, unseen, self.judge, collate=chunks.collate, loading={}, **how
                    )
                found, count = found + loss, count + counted
                self.examples += len(unseen) / 3  # a forward pass is a third of a step
        if not math.isfinite(found):
            return math.inf
        return count / 2 * math.log(max(found / count, 1e-30)) if self.problem.is_squared else found

    def _direct_parameters(self) -> list[nn.Parameter]:
        paths = {module: path for path, module in self.problem.network.named_modules()}
        modules = [self.network.get_submodule(paths[module]) for module in self.problem.direct]
        return [parameter.requires_grad_() for module in modules for parameter in module.parameters()]

    def direct_state(self) -> dict[str, Tensor]:
        """Return the parameters that learn by gradient descent, by their names."""
        own = set(self.direct)
        return {name: p.detach().clone() for name, p in self.network.named_parameters() if p in own}

    @torch.no_grad()
    def _load_direct(self, state: dict[str, Tensor]) -> None:
        parameters = dict(self.network.named_parameters())
        for name, value in state.items():
            parameters[name].copy_(value)

    def state(self) -> dict:
        """Return what a training needs to go on with the same bits."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "direct_optimizer": self.direct_optimizer.state_dict() if self.direct_optimizer else None,
            "generator": self.generator.get_state(),
            "noise": self.noise,
            "done": self.done,
            "judged": self.judged,
            "examples": self.examples,
        }

    def load_state(self, state: dict) -> None:
        """Continue from a state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.direct_optimizer:
            self.direct_optimizer.load_state_dict(state["direct_optimizer"])
        self.generator.set_state(state["generator"])
        self.noise, self.done = state["noise"], state["done"]
        self.judged, self.examples = list(state["judged"]), state["examples"]


def _partitioned(factory: Any, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of partnets.optim that steps as a factory's does."""
    made = factory([nn.Parameter(torch.zeros(1))])
    if len(made.param_groups) > 1:
        raise ValueError("optimizer makes several groups of parameters; more than two chunks take one group.")
    options = made.param_groups[0]
    own = {torch.optim.Adam: optim.Adam, torch.optim.AdamW: optim.AdamW, torch.optim.SGD: optim.SGD}.get(type(made))
    if own is None or any(options[name] for name in own.unserved):
        own = functools.partial(optim.PerPartition, type(made))
        return own(network, **{name: options[name] for name in options.keys() & arguments(type(made)) - {"params"}})
    return own(network, **{name: options[name] for name in options.keys() & arguments(own)})
