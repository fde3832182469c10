"""Training: one training of a copy of the network at given values, judged by unseen data."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import Subset

from partnets import optim
from partnets.convert import partition
from partnets.convert.deploying import deployed
from partnets.data.chunks import draw_k
from partnets.data.fetching import batches
from partnets.data.normalise import ToFloat
from partnets.evaluation.metrics import total_loss
from partnets.evaluation.running_statistics import fresh_statistics
from partnets.hyper import Hyperparameter, InTraining, Learned, hyperparameters
from partnets.hyper.penalty import penalised
from partnets.optim.entrywise import arguments
from partnets.subnetworks.context import subnetwork
from partnets.training.preflight import warn_of_knowledge
from partnets.training.step import clip_gradient, parameters_of, step_weights
from partnets.tuning.loss import AtTemperatures, best_temperature, divided, guessed_nats, has_temperature
from partnets.tuning.problem import Problem
from partnets.tuning.search import JUDGEMENTS
from partnets.utils import random_state
from partnets.utils.losses import mean, name_of, scores
from partnets.utils.modules import evaluating, frozen, to_device, training

# Modules that learn by gradient descent start after a share FIRST of a training, and take a step every EVERY steps, or
# more often in a short training, to reach UPDATES steps.
FIRST, EVERY, UPDATES = 0.25, 4, 110
# Adam's learning rate for them is TRAVEL, in unconstrained units, over the number of updates, within RATES.
TRAVEL, RATES = 15.0, (0.02, 0.3)
# Number of copies of each unseen example, each with a separate augmentation; predictions are averaged over them.
COPIES = 4
# Initial positions of an augmentation's width in its range; less with fewer than UPDATES updates. The next one is tried
# if augmentations do harm. On rotated digits, .2 stayed too narrow. A network that is to tell four directions of arrows
# learned nothing from .4, and from .1 that rotations do harm.
STARTS = 0.4, 0.1, 0.01
# A width that falls below the share SHRUNK of its start may have done harm until then: widths start again as LEARNED.
# On rotated digits and on digits to be told apart by rotations, this lowered test losses from 1.35 to 1.20 and from .17
# to .10; after a start of .1, it was no better in three of three trainings.
SHRUNK, LEARNED = 0.25, 0.0
# Number of unaugmented examples for the statistics of batch normalisation: at a judgement, at the end.
ESTIMATED = 512, 2048
# Batch size of judgements.
BATCH = 256
# The attributes of a training that change, besides its modules, optimizers and generator.
PROGRESS = ("noise", "done", "judged", "temperature", "counted", "schedule", "examples")


def due(steps: int, judgements: int = JUDGEMENTS) -> list[int]:
    """Return the steps after which unseen data judge a training."""
    return sorted({math.ceil(steps * i / judgements) for i in range(1, judgements + 1)})


def learning_steps(steps: int) -> tuple[int, int]:
    """Return the number of training steps per update of modules that learn, and the number of updates."""
    every = max(1, min(EVERY, int((1 - FIRST) * steps / UPDATES)))
    return every, math.ceil((1 - FIRST) * steps / every)


def learning_cost(problem: Problem) -> float:
    """Return the cost of learning by gradient descent, as a share of a training's cost."""
    if not problem.direct:
        return 0.0
    copies = COPIES if _augmenting(problem.network, problem.direct) else 1
    # Without gradients of the weights, a step costs a third less.
    return 2 / 3 * copies * (1 - FIRST) / learning_steps(problem.steps)[0]


def _augmenting(network: nn.Module, paths: list[str]) -> list[InTraining]:
    """Return the InTraining modules around augmentations that learn."""
    learning = [network.get_submodule(path) for path in paths]
    return [module for module in network.modules() if isinstance(module, InTraining) and module.module in learning]


class Training:
    """One training of a copy of a problem's network; it resumes from its state with bitwise equal results.

    With two chunks, the network trains on D_1 and D_2 judges it. With more chunks, the network is partitioned,
    partition k trains on D_1:k, and L_ML judges it. With a single chunk, nothing judges it.

    Args:
        problem: the network, data and settings.
        positions: the position of each setting in its range, in [0, 1].
        batch_size, steps: those of this training; batches have batch_size examples on average, and at least 1.
        seed: seed of batches and noise.
        everything: whether it trains on all data, without judgements.
        learns: whether modules that can learn by gradient descent do so, from unseen data.
        start: the initial position of augmentations' widths, if they learn.
        learned: the initial values of all parameters that learn by gradient descent, instead of `start`.
        schedule: their values in another training, to be repeated: see Attributes. If they neither learn nor repeat a
            schedule, augmentations are switched off.
        unseen: the number of unseen examples that judge it; all if None.
        judgements: the number of judgements, evenly spaced, the last one at the end.

    Attributes:
        network, optimizer, loss: copies for this training, with the settings applied.
        done: the number of steps so far.
        judged: the loss of unseen data in nats at each judgement so far.
        temperature: the best one at the last judgement, or 1. It divides logits that unseen data judge, if
            augmentations learn, which would otherwise learn to make an overconfident network less confident.
        schedule: for each parameter that learns by gradient descent, its values at the start and at each judgement,
            [1 + judgements, ...], by its name.
        examples: the number of examples processed so far, unseen data included, in units of a training step's cost.
        counted: the number of unseen targets in the last judgement.
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
        start: float = STARTS[0],
        learned: Mapping[str, Tensor] | None = None,
        schedule: Mapping[str, Tensor] | None = None,
        unseen: int | None = None,
        judgements: int = JUDGEMENTS,
    ) -> None:
        self.problem, self.batch_size, self.steps, self.seed = problem, batch_size, steps, seed
        self.chunks = problem.everything if everything else problem.chunks
        self.due, self.unseen = due(steps, judgements), unseen
        # The final training may have fewer steps, but follows the schedule at full length.
        self.times = [0, *due(problem.steps, judgements)]
        self.done, self.temperature, self.counted, self.examples = 0, 1.0, 0, 0.0
        self.noise: dict[str, Any] | None = None
        self.judged: list[float] = []
        self.network, self.loss = copy.deepcopy((problem.network, problem.loss))
        self.network.to(problem.device)
        if not (self.network[-1] if problem.outside else self.network).training:
            self.network.train()  # otherwise modules in evaluation mode stay so, such as a frozen backbone
        psi = set(hyperparameters(self.network))
        for parameter in psi:
            parameter.requires_grad_(False)
        weights = [p for p in self.network.parameters() if p.requires_grad and p not in psi]
        self.learning = [self.network.get_submodule(path) for path in problem.direct]
        own = {parameter for module in self.learning for parameter in module.parameters()}
        learning = {name: parameter for name, parameter in self.network.named_parameters() if parameter in own}
        self.augmenting = _augmenting(self.network, problem.direct)
        if not (learns or schedule):
            for module in self.augmenting:
                module.eval()
        self.repeated = {learning[name]: values.to(problem.device) for name, values in (schedule or {}).items()}
        self.partitioned = len(self.chunks) > 2
        if self.partitioned:
            self.network = partition(self.network, self.chunks.proportions, defaults="stored", seed=seed)
            self.optimizer = partitioned_optimizer(problem.optimizer, self.network)
        else:
            self.optimizer = problem.optimizer(weights)
        for setting, position in zip(problem.settings, positions, strict=True):
            setting.put(self, setting.value(position))
        self.scheduler = problem.scheduler(self.optimizer) if problem.scheduler else None
        self.judge = problem.judge
        # Without augmentations, temperatures did not improve a training, and slightly worsened it with noisy labels.
        self.tempered = learns and bool(self.augmenting) and has_temperature(problem.loss)
        self.direct, self.direct_optimizer = learning if learns else {}, None
        self.every, updates = learning_steps(steps)
        if self.direct:
            self.limits = [self._put_starts(position) for position in (0.0, 1.0)]
            self.start = start * min(1.0, updates / UPDATES)
            self._put_starts(self.start)
            if learned:
                self._put(learned[name] for name in self.direct)
            for parameter in self.direct.values():
                parameter.requires_grad_()
            self.direct_optimizer = torch.optim.Adam(self._direct_groups(updates))
        self.schedule: dict[str, list[Tensor]] = {}
        self._record_direct()
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def is_judged(self) -> bool:
        """True if unseen data judge this training."""
        return len(self.chunks) > 1

    def run(self, until: int) -> None:
        """Train up to a step with this training's random states; the caller's are restored.

        A non-finite loss ends the training; the remaining judgements of a judged training are infinite.

        Raises:
            FloatingPointError: the loss of a training without judgements is not finite.
        """
        device = self.problem.device
        with random_state.preserved(device):
            if self.noise is None:
                random_state.seed_all(self.seed)
            else:
                random_state.set_state(self.noise, device)
            while self.done < min(until, self.steps):
                if not self._step():
                    break
                if self.is_judged and self.done in self.due:
                    if self.direct:
                        self.estimate_norms(ESTIMATED[0])
                    nats, self.temperature, self.counted = self._nats(self._unseen())
                    self.judged.append(nats)
                    self._record_direct()
            if self.repeated and self.done == self.steps:
                self.estimate_norms(ESTIMATED[1])
            self.noise = random_state.get_state(device)

    def _step(self) -> bool:
        """Take a training step; return whether its loss was finite."""
        self._repeat_schedule()
        k = 1
        if self.partitioned:
            # L_ML does not use partition C, so it is not trained.
            k = draw_k([*self.chunks.proportions[:-1], 0.0], self.generator)
        size = max(1, math.floor((self.done + 1) * self.batch_size) - math.floor(self.done * self.batch_size))
        batch = to_device(self.chunks.sample_upto(k, size, self.generator), self.problem.device)
        if self.partitioned:
            loss = step_weights(self.network, self.optimizer, k, batch, self._loss, clip=self.problem.clip)
        else:
            loss = self._step_weights(batch)
        if self.scheduler:
            self.scheduler.step()
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
            self.schedule = {name: values + values[-1:] * missing for name, values in self.schedule.items()}
            self.done = self.steps
            return False
        if self.direct and self.done % self.every == 0 and self.done >= FIRST * self.steps:
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

    def _put_starts(self, position: float) -> list[Tensor]:
        """Set the widths of augmentations to a position of their ranges, and return copies of all learning values."""
        for start in self.problem.starts:
            start.put(self, start.value(position))
        return [parameter.detach().clone() for parameter in self.direct.values()]

    def shrank(self) -> bool:
        """Return whether the width of an augmentation fell below SHRUNK of its initial position in its range."""
        if not (self.direct and self.problem.starts):
            return False
        values = [parameter.detach().clone() for parameter in self.direct.values()]
        bounds = self._put_starts(SHRUNK * self.start)
        self._put(values)
        rows = zip(values, bounds, *self.limits, strict=True)
        return any(bool((value < bound)[least != most].any()) for value, bound, least, most in rows)

    @torch.no_grad()
    def _put(self, values: Iterable[Tensor]) -> None:
        """Set the values of all modules that learn."""
        for parameter, value in zip(self.direct.values(), values, strict=True):
            parameter.copy_(value)

    def _record_direct(self) -> None:
        for name, parameter in self.direct.items():
            # On the CPU, as after loading an interrupted search.
            self.schedule.setdefault(name, []).append(parameter.detach().to("cpu", copy=True))

    def _direct_groups(self, updates: int) -> list[dict]:
        """Return the parameters that learn by gradient descent, with their learning rates.

        The rate of numbers suits their ranges. The weights of a Submodule have no range, and learn at the optimizer's
        rate.
        """
        parts = [part for module in self.learning for part in module.modules() if isinstance(part, Learned)]
        numbers = {parameter for part in parts for parameter in part.parameters()}
        rate = min(max(TRAVEL / updates, RATES[0]), RATES[1])
        groups = [{"params": [one for one in self.direct.values() if one in numbers], "lr": rate}]
        weights = [one for one in self.direct.values() if one not in numbers]
        usual = {"params": weights, "lr": self.every * float(self.optimizer.param_groups[0]["lr"])}
        return [*groups, usual] if weights else groups

    def _step_direct(self) -> None:
        """Update the modules that learn by gradient descent, on unseen data and with fixed weights."""
        k = 2
        if self.partitioned:
            k = draw_k([0.0, *self.chunks.proportions[1:]], self.generator)
        size, copies = max(1, round(self.batch_size)), COPIES if self.augmenting else 1
        batch = to_device(self.chunks.sample(k, size, self.generator), self.problem.device)
        self.direct_optimizer.zero_grad()
        with (
            self._subnetwork(k - 1),
            frozen(parameters_of(self.optimizer)),
            evaluating(self.network),
            training(*self.learning),
        ):
            output, y = self._averaged(self.network, batch, copies)
            mean(self.judge, divided(output, self.temperature), y).backward()
        self.direct_optimizer.step()
        with torch.no_grad():
            for parameter, least, most in zip(self.direct.values(), *self.limits, strict=True):
                # Equal limits belong to a number without a range.
                parameter.copy_(torch.where(least == most, parameter, parameter.clamp(least, most)))
        self.examples += 2 / 3 * copies * size

    def _subnetwork(self, active: int) -> AbstractContextManager:
        return subnetwork(self.network, active=active) if self.partitioned else nullcontext()

    def _averaged(self, network: nn.Module, batch: Any, copies: int) -> tuple[Any, Any]:
        """Return the outputs, averaged over augmented copies as in hyper.Averaged, and the targets of a batch.

        Outputs that are not tensors, as custom losses may take, come from a single copy.
        """
        with training(*self.augmenting):
            output, y = self.problem.forward(network, batch)
            if name_of(self.judge):
                output = scores(output)
            if copies > 1 and isinstance(output, Tensor):
                rest = [scores(self.problem.forward(network, batch)[0]) for _ in range(copies - 1)]
                output = torch.stack([output, *rest]).mean(0)
        return output, y

    def estimate_norms(self, examples: int) -> None:
        """Estimate the running statistics of batch normalisation on training examples without augmentation.

        Predictions use no augmentation, and statistics of augmented images would not fit them.
        """
        norms = [norm for norm in self.network.modules() if isinstance(norm, _NormBase) and norm.training]
        norms = [norm for norm in norms if norm.running_mean is not None]
        if not norms or not self.augmenting or self.partitioned:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
        size = min(self.problem.batch_size, self.chunks.sizes[0])
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad(), evaluating(self.network), training(*norms):
            for n in range(1, math.ceil(examples / size) + 1):
                for norm in norms:
                    norm.momentum = 1 / n  # average over all batches
                batch = to_device(self.chunks.sample_upto(1, size, generator), self.problem.device)
                self.problem.forward(self.network, batch)
                self.examples += size / 3
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    @torch.no_grad()
    def _repeat_schedule(self) -> None:
        """Set parameters to their values at this step of another training."""
        after = next((i for i, time in enumerate(self.times) if time > self.done), len(self.times) - 1)
        start, end = self.times[after - 1 : after + 1]
        for parameter, values in self.repeated.items():
            parameter.copy_(torch.lerp(values[after - 1], values[after], (self.done + 1 - start) / (end - start)))

    @torch.no_grad()
    def warn_of_knowledge(self) -> None:
        """Warn if the network, before its first step, predicts unseen labels much better than a guess."""
        with random_state.preserved(self.problem.device), evaluating(self.network), self._subnetwork(1):
            batch = self.chunks.sample(2, BATCH, torch.Generator().manual_seed(self.seed))
            output, y = self.problem.forward(self.network, to_device(batch, self.problem.device))
            warn_of_knowledge(self.judge, mean(self.judge, output, y), y, stacklevel=5)

    def averaged_nats(self, copies: int) -> float:
        """Return the loss of unseen data in nats, with predictions averaged over augmented copies."""
        with random_state.preserved(self.problem.device):
            torch.manual_seed(self.seed)
            return self._nats(self._unseen(), copies)[0]

    def fitted(self) -> float | None:
        """Return the nats per target by which training examples are predicted better than by a guess, or None."""
        number = sum(len(unseen) for _, unseen in self._unseen())
        own = [(2, Subset(self.chunks[1], range(min(number, self.chunks.sizes[0]))))]
        with random_state.preserved(self.problem.device):
            nats, _, count = self._nats(own)
        guessed = self._guessed_nats(own)
        return None if guessed is None else (guessed - nats) / count

    def guessed_nats(self) -> float | None:
        """Return the loss of unseen data in nats by the best constant prediction, or None if unknown."""
        return self._guessed_nats(self._unseen())

    def _unseen(self) -> Iterator[tuple[int, Subset]]:
        """Yield each unseen chunk's number and the part of it that judges."""
        chunks = self.chunks
        share = 1.0 if self.unseen is None else self.unseen / sum(chunks.sizes[1:])
        for k in range(2, len(chunks) + 1):
            yield k, Subset(chunks[k], range(max(1, round(share * len(chunks[k])))))

    def _nats(self, judging: Iterable[tuple[int, Subset]], copies: int = 0) -> tuple[float, float, int]:
        """Return the loss of examples in nats, the temperature that divided the logits, and the number of targets.

        A squared error counts as n / 2 log(error) for n numbers. In a partitioned network, subnetwork k - 1 predicts
        chunk k (Eq. 2). `judging` has pairs of k and examples.
        """
        how = {"batch_size": BATCH, "forward": self.problem.forward}
        forward = functools.partial(self._averaged, copies=copies) if copies else self.problem.forward
        forward = AtTemperatures(forward, self.judge) if self.tempered else forward
        judging_by = how | {"forward": forward, "collate": self.chunks.collate, "loading": {}}
        found, count = 0.0, 0
        with fresh_statistics(self.network, self.chunks, **how) if self.partitioned else nullcontext():
            for k, examples in judging:
                with self._subnetwork(k - 1):
                    loss, counted = total_loss(self.network, examples, self.judge, **judging_by)
                found, count = found + loss, count + counted
                self.examples += max(1, copies) * len(examples) / 3  # a forward pass is a third of a step
        if not math.isfinite(found):
            return math.inf, 1.0, count
        if self.problem.squared:
            return count * self.problem.squared / 2 * math.log(max(found / count, 1e-30)), 1.0, count
        return *(best_temperature([found, *forward.nats]) if self.tempered else (found, 1.0)), count

    @torch.no_grad()
    def _guessed_nats(self, judging: Iterable[tuple[int, Subset]]) -> float | None:
        judged = []
        with random_state.preserved(self.problem.device), evaluating(self.network):
            for _, examples in judging:
                for batch in batches(examples, BATCH, collate=self.chunks.collate):
                    judged.append(self.problem.forward(self.network, to_device(batch, self.problem.device)))
                self.examples += len(examples) / 3
        return guessed_nats(self.judge, judged)

    def deployed(self) -> nn.Module:
        """Return the user's network as trained here, in evaluation mode and without modules of partnets.hyper.

        Modules in front of it that change predictions, such as an input mask, are kept as torch modules.

        Raises:
            ValueError: a module has no equivalent in torch.
        """
        network = self.network
        if any(isinstance(module, Hyperparameter) for module in network.modules()):
            network = deployed(network, draws=0, seed=0)
        if self.problem.outside:
            *front, network = network
            kept = [layer for layer in front if type(layer) is not nn.Identity]
            # The network has its own ToFloat.
            needless = sum(isinstance(layer, ToFloat) for layer in self.network[: self.problem.outside])
            network = nn.Sequential(*kept, network) if len(kept) > needless else network
        for parameter in network.parameters():
            parameter.grad = None
        return network.eval()

    def _stateful(self) -> dict[str, Any]:
        every = {
            "network": self.network,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "direct_optimizer": self.direct_optimizer,
        }
        return {name: one for name, one in every.items() if one is not None}

    def _modules(self) -> list[nn.Module]:
        """Return the modules of the network and of the loss."""
        return [*self.network.modules(), *(self.loss.modules() if isinstance(self.loss, nn.Module) else ())]

    def state(self) -> dict[str, Any]:
        """Return the state from which training continues with the same bits, with attributes such as step counters."""
        plain = bool | int | float | str
        return {
            **{name: one.state_dict() for name, one in self._stateful().items()},
            "attributes": [
                {n: v for n, v in vars(module).items() if isinstance(v, plain)} for module in self._modules()
            ],
            "generator": self.generator.get_state(),
            "progress": {name: getattr(self, name) for name in PROGRESS},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for name, one in self._stateful().items():
            one.load_state_dict(state[name])
        for module, attributes in zip(self._modules(), state["attributes"], strict=True):
            vars(module).update(attributes)
        self.generator.set_state(state["generator"])
        vars(self).update(state["progress"])


def partitioned_optimizer(factory: Any, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of partnets.optim that corresponds to a factory's optimizer."""
    given = [parameter for parameter in network.parameters() if parameter.requires_grad]
    made = factory(given)
    if (sizes := [len(group["params"]) for group in made.param_groups]) != [len(given)]:
        raise ValueError(
            f"optimizer makes groups of {sizes} of {len(given)} parameters; more than two chunks take one group of all."
        )
    options = made.param_groups[0]
    own = {torch.optim.Adam: optim.Adam, torch.optim.AdamW: optim.AdamW, torch.optim.SGD: optim.SGD}.get(type(made))
    if own is None or any(options[name] for name in own.unserved):
        own = functools.partial(optim.PerPartition, type(made))
        return own(network, **{name: options[name] for name in options.keys() & arguments(type(made)) - {"params"}})
    return own(network, **{name: options[name] for name in options.keys() & arguments(own)})
