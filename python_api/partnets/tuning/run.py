"""tune: a trained network from a network, data and the names of hyperparameters, in one call."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from partkernels.arguments import check_seed
from partnets.data.batch import Forward, Loss, call
from partnets.data.dataset import Data
from partnets.data.examples import Collate
from partnets.data.normalise import ToFloat
from partnets.hyper import Hyperparameter
from partnets.tuning.preflight import try_steps
from partnets.tuning.problem import Optimizer, Problem, Scheduler, check_function, make_problem
from partnets.tuning.result import Trial, Tuned
from partnets.tuning.search import MAIN, Plan, best_end, choose, design, no_better, plan
from partnets.tuning.training import UPDATES, Training, due, learning_cost, learning_steps
from partnets.utils import random_state
from partnets.utils.files import replacing
from partnets.utils.likelihood import OTHERS, name_of
from partnets.utils.modules import modes_kept
from partnets.utils.seeds import derived

LOG = logging.getLogger("partnets")
# The smallest batch of a network with batch normalisation; statistics of fewer examples are too noisy.
NORMALISED = 4
# Number of augmented copies in the note about averaged predictions.
AVERAGED = 8
# A note reports a width that changed in the last tenth of a training by more than this share of its range.
STILL = 0.05
# A note reports fewer unseen examples than this.
FEW = 20
# A note reports if more numbers learned from the unseen examples than this share of these examples.
MANY = 0.5
# A note reports a cost above this multiple of the budget.
OVER = 1.1
# A training has memorised its examples if, relative to a guess, it predicts unseen ones worse by this many nats per
# target. Small transformers that had learned nothing were at .07 at most, regressions of noise or of a weak signal at
# .07 to .16 and more.
MEMORISED = 0.1
GUESSING = "No training of the search predicted unseen data better than a guess that is the same for all"
UNLEARNED = "; the values are those of an untuned training. Pass more steps or a larger budget."
MEMORY = ", and an untuned one learns its own examples by heart"
WEAK = ". The data say little of the targets, the network does not fit them, or the steps are too few."

Callback = Callable[[Training], None]


def tune(
    network: nn.Module,
    data: Data | Dataset | Sequence,
    hyper: str | Hyperparameter | Sequence[str | Hyperparameter],
    *,
    steps: int,
    batch_size: int = 64,
    budget: float = 2.0,
    loss: Loss | None = None,
    optimizer: Optimizer = torch.optim.Adam,
    scheduler: Scheduler | None = None,
    proportions: Sequence[float] = (0.8, 0.2),
    clip: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    groups: Any = None,
    stratify: Any = None,
    callbacks: Iterable[Callback] = (),
    collate: Collate | None = None,
    forward: Forward = call,
    resume_from: str | os.PathLike | None = None,
) -> Tuned:
    """Choose hyperparameters of a network by data that it has not seen, and train it with them on all data.

    The search trains copies of the network at different values, from untuned to heavily regularised ones. They take as
    many steps as the final training, but with smaller batches, and each is judged by the chunks that it has not seen.
    The chosen values are the mean over the trainings, weighted by exp(L_ML). One more training, at the chosen values,
    determines the number of steps of the final training, which starts from the given weights and takes all data. The
    final training is untuned if no training predicts unseen data better than the best constant guess, unless an
    untuned training has memorised its examples.

    Augmentations (hyper.Affine, ColourJitter) and modules that change predictions (hyper.InputMask, Temperature,
    ObservationNoise, Submodule) learn by gradient descent in the training at the chosen values, from its unseen data.
    The final training repeats the schedule that they learned.

    Args:
        network: any torch module; it is left unchanged. Each training starts from its weights, such as pretrained ones.
        data: a Dataset of (x, y) or of dicts with labels, tensors or NumPy arrays (x, y), or a partnets.data.Data.
        hyper: names of hyperparameters: 'dropout' (the rate of each nn.Dropout), 'dropout:one' (one rate for all),
            'weight_decay' and 'learning_rate' of the optimizer, 'label_smoothing' of the cross-entropy; and modules of
            partnets.hyper, in the network or to be put in front of it, such as hyper.Affine(), which then acts in
            training only. Modules that change predictions, such as hyper.InputMask, remain in front of the result.
        steps: the largest number of steps of the final training.
        batch_size: batch size of the final training.
        budget: the cost of all trainings, the final one included, in trainings of `steps` full batches; more than 1.
        loss: loss(output, y), the mean negative log-likelihood in nats. By default the cross-entropy for integers (of
            tokens too), the binary cross-entropy for zeros and ones in the shape of the output, and otherwise the
            squared error, which counts as n / 2 log(error) nats.
        optimizer: makes an optimizer of a list of parameters, such as functools.partial(torch.optim.AdamW, lr=3e-4).
        scheduler: makes a scheduler of that optimizer, such as lambda optimizer: CosineAnnealingLR(optimizer, steps),
            which steps after each step of each training.
        proportions: proportions of the chunks. With two, networks train on the first and the second judges them. With
            more, they are partitioned (Mlodozeniec et al. 2023) and L_ML judges them, which needs no larger share of
            unseen data.
        clip: the largest norm of a gradient.
        device: device of the trainings; by default the network's.
        seed: an int in [0, 2**63), seed of chunks, batches, noise and the values that are tried.
        groups, stratify: a label for each example, as in partnets.chunk: a group is in one chunk, and each chunk has
            its share of each class.
        callbacks: called after each tenth of each training as callback(training): see Training.
        collate: makes a batch of a list of examples.
        forward: forward(network, batch), which returns output and y.
        resume_from: a file that stores the search after each tenth of a training. If it exists, tune continues from it,
            with the same result as without an interruption.

    Returns:
        The chosen values, the trained network and the trainings of the search: see Tuned.

    Raises:
        ValueError: an argument is out of range; `hyper` does not match the network; the network does not take the data,
            or the loss its outputs and labels; resume_from is of another search. All are raised before training.
        TypeError: data or hyper have another type.
        RuntimeError: gradients are disabled, or the call is within torch.autocast.
        FloatingPointError: no training of the search has a finite loss, or the final one does not.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import partnets
        >>> x = torch.randn(100, 4)
        >>> network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        >>> result = partnets.tune(network, (x, (x[:, 0] > 0).long()), ["dropout", "weight_decay"], steps=20)
        >>> sorted(result.values), type(result.model[3])
        (['dropout', 'weight_decay'], <class 'torch.nn.modules.linear.Linear'>)
    """
    check_seed("seed", seed)
    if not isinstance(budget, int | float) or not (budget > 1 and math.isfinite(budget)):
        raise ValueError(f"budget={budget!r}; pass a number above 1: the final training takes 1.")
    if not isinstance(resume_from, str | os.PathLike | None):
        raise TypeError(f"resume_from is a {type(resume_from).__name__}; pass the path of a file.")
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        check_function("callbacks", callback, "a training, or a list of such functions")
    problem = make_problem(
        network,
        data,
        hyper,
        steps=steps,
        batch_size=batch_size,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        proportions=proportions,
        clip=clip,
        device=device,
        seed=seed,
        groups=groups,
        stratify=stratify,
        collate=collate,
        forward=forward,
    )
    least = NORMALISED if any(isinstance(module, _NormBase) for module in network.modules()) else 1
    unseen = sum(problem.chunks.sizes[1:])
    options = {"batch_size": batch_size, "steps": steps, "unseen": unseen, "least": least}
    planned = plan(problem.settings, budget, learning=learning_cost(problem), **options)
    problem = try_steps(problem, planned)
    return _Search(problem, planned, budget, seed, callbacks, resume_from).run()


class Finished(NamedTuple):
    """The results that are kept of a training.

    Attributes:
        nats: the loss at each judgement.
        cost: the cost in trainings of full batches.
        counted: the number of targets in each judgement.
        averaged: the nats at the end averaged over augmented copies, only of the training at the chosen values.
        guessed: the nats of the best constant prediction, if known; likewise.
        fitted: the nats per target by which it predicts its training examples better than a guess, if known; only of
            the untuned training.
    """

    nats: list[float]
    cost: float
    counted: int
    averaged: float | None
    guessed: float | None
    fitted: float | None


class _Search:
    """All trainings of one call, in order, saved to a file after each tenth of each."""

    def __init__(
        self,
        problem: Problem,
        planned: Plan,
        budget: float,
        seed: int,
        callbacks: list[Callback],
        path: str | os.PathLike | None,
    ) -> None:
        self.problem, self.plan, self.budget, self.seed, self.callbacks = problem, planned, budget, seed, callbacks
        self.path = None if path is None else Path(path)
        self.finished: list[Finished] = []
        # The state of the current training.
        self.present: dict | None = None
        self.schedule: dict[str, Tensor] = {}
        if self.path is not None and self.path.exists():
            self._load()
        self.begun = 0

    def run(self) -> Tuned:
        """Run the remaining trainings: of the search, at the chosen values, and the final one."""
        problem, settings, planned = self.problem, self.problem.settings, self.plan
        points, factors = torch.zeros(0, 0, device="cpu"), []
        if settings:
            points, factors = design(settings, planned.levels, derived(self.seed, "design"))
        total = len(points) * planned.member_batch + planned.confirm_batch + problem.batch_size
        form = "{desc} |{bar:20}| {percentage:.0f} % of the budget, {elapsed}, {remaining} left{postfix}"
        with tqdm(total=total / problem.batch_size, disable=None, bar_format=form) as self.bar:
            options = {"batch_size": planned.member_batch, "seed": derived(self.seed, "search")}
            tried = [self._train(f"search {i + 1}", point.tolist(), **options) for i, point in enumerate(points)]
            chosen, weights = torch.zeros(0, device="cpu"), torch.zeros(0, device="cpu")
            if settings:
                chosen, weights = choose(points, factors, torch.tensor([one.nats for one in tried], device="cpu"))
            options = {"batch_size": planned.confirm_batch, "seed": derived(self.seed, "confirm")}
            confirmed = self._train("chosen", chosen.tolist(), learns=bool(problem.direct), last=True, **options)
            guessing = no_better(confirmed.guessed, [one.nats for one in (*tried, confirmed)])
            memorised = guessing and bool(tried) and _memorised(tried[0], confirmed.guessed / confirmed.counted)
            unlearned = guessing and bool(tried) and not memorised
            end = len(confirmed.nats) if unlearned else best_end(confirmed.nats)
            steps = due(problem.steps)[end - 1]
            final = self._final((points[0] if unlearned else chosen).tolist(), steps)
        history = [
            self._trial(point, found, planned.member_batch, float(weight))
            for point, found, weight in zip(points, tried, weights, strict=True)
        ]
        checked = self._trial(chosen, confirmed, planned.confirm_batch, 1.0)
        schedule = self._schedule(final, end)
        values = history[0].values if unlearned else checked.values
        values = values | {name: values[-1] for name, values in schedule.items()}
        model = final.deployed()
        cost = sum(trial.cost for trial in [*history, checked]) + self._cost(final.examples)
        augmentation = _augmentation(final)
        notes = [
            *([GUESSING + (UNLEARNED if unlearned else MEMORY * memorised + WEAK)] if guessing else ()),
            *_notes_of_data(problem),
            *(() if unlearned else notes_of_choice(problem, history, chosen)),
            *_notes_of_end(problem, checked, end, schedule, confirmed.averaged if augmentation is not None else None),
        ]
        if cost > OVER * self.budget:
            notes.append(
                f"The cost of {cost:.2f} trainings is above the budget of {self.budget:g}: few steps or small batches."
            )
        for note in notes:
            LOG.info("%s", note)
        lml = -(tried[0] if unlearned else confirmed).nats[end - 1]
        return Tuned(
            values, model, lml, confirmed.counted, steps, schedule, history, checked, cost, notes, augmentation
        )

    def _train(self, name: str, positions: list[float], last: bool = False, **options) -> Finished:
        """Return the results of a training, which may have ended before an interruption."""
        self.begun += 1
        if self.begun > len(self.finished):
            options |= {"steps": self.problem.steps, "unseen": self.plan.unseen}
            training = Training(self.problem, positions, **options)
            self._fit(training, name)
            self.schedule = {name: torch.stack(rows) for name, rows in training.schedule.items()}
            averaged = training.averaged_nats(AVERAGED) if training.direct and training.augmenting else None
            guessed = training.guessed_nats() if last else None
            fitted = training.fitted() if self.begun == 1 and not last else None
            nats, cost = list(training.judged), self._cost(training.examples)
            self.finished.append(Finished(nats, cost, training.counted, averaged, guessed, fitted))
            self.present = None
            LOG.info("%s: %.1f nats at %s", name, training.judged[-1], self._values(positions))
        else:
            self.bar.update(options["batch_size"] / self.problem.batch_size)
        return self.finished[self.begun - 1]

    def _final(self, positions: list[float], steps: int) -> Training:
        options = {"batch_size": self.problem.batch_size, "seed": derived(self.seed, "final")}
        training = Training(self.problem, positions, steps=steps, everything=True, schedule=self.schedule, **options)
        self._fit(training, "final training")
        self.bar.update(self.bar.total - self.bar.n)
        return training

    def _fit(self, training: Training, name: str) -> None:
        self.bar.set_description_str(name)
        if self.present is not None:
            training.load_state(self.present)
        for until in training.due:
            if training.done >= until:
                continue
            training.run(until)
            self.bar.update(training.batch_size / self.problem.batch_size / len(training.due))
            if training.judged:
                self.bar.set_postfix_str(f"L_ML {-training.judged[-1]:.1f}")
            for callback in self.callbacks:
                with random_state.preserved(self.problem.device), modes_kept(training.network):
                    callback(training)
            self.present = training.state()
            self._save()

    @torch.no_grad()
    def _schedule(self, final: Training, end: int) -> dict[str, list[float]]:
        """Return the values of numbers that learned by gradient descent, at the start and after each tenth."""
        paths = {module: path for path, module in self.problem.network.named_modules()}
        found = {}
        for row in range(min(end + 1, len(final.times))):
            for parameter, values in final.repeated.items():
                parameter.copy_(values[row])
            for module in self.problem.direct:
                for name, value in final.network.get_submodule(paths[module]).values().items():
                    found.setdefault(name, []).append(value)
        return found

    def _cost(self, examples: float) -> float:
        return examples / (self.problem.steps * self.problem.batch_size)

    def _values(self, positions: Sequence[float]) -> dict[str, float]:
        named = zip(self.problem.settings, positions, strict=True)
        return {setting.name: setting.value(float(position)) for setting, position in named}

    def _trial(self, point: Tensor, found: Finished, batch_size: float, weight: float) -> Trial:
        return Trial(self._values(point.tolist()), found.nats, batch_size, weight, found.cost)

    @property
    def _identity(self) -> str:
        """A text that identifies this search."""
        return f"{self.problem.identity} {self.plan} {self.seed}"

    def _save(self) -> None:
        if self.path is None:
            return
        kept = {"identity": self._identity, "finished": [tuple(each) for each in self.finished]}
        kept["present"] = self.present
        kept["schedule"] = self.schedule
        with replacing(self.path, binary=True) as file:
            torch.save(kept, file)

    def _load(self) -> None:
        try:
            kept = torch.load(self.path, map_location="cpu", weights_only=True)
            identity = kept["identity"]
        except Exception as error:
            raise ValueError(f"resume_from={str(self.path)!r} is not a file of partnets.tune: {error}") from error
        if identity != self._identity:
            raise ValueError(
                f"resume_from={str(self.path)!r} is of another search: the network, the data or an argument differs."
                " Pass the arguments of that search, or another path."
            )
        self.finished = [Finished(*each) for each in kept["finished"]]
        self.present, self.schedule = kept["present"], kept["schedule"]


def _augmentation(final: Training) -> nn.Module | None:
    """Return a copy of the augmentations in front of a network, or None if there is none or one is further inside."""
    layers = final.network if isinstance(final.network, nn.Sequential) else ()
    first = list(takewhile(lambda layer: layer in final.augmenting or isinstance(layer, ToFloat), layers))
    found = [getattr(layer, "module", layer) for layer in first]
    count = sum(layer in final.augmenting for layer in first)
    return copy.deepcopy(nn.Sequential(*found)) if found and count == len(final.augmenting) else None


def _memorised(untuned: Finished, guessed: float) -> bool:
    """Return whether an untuned training memorised its examples; `guessed`: nats of an unseen target."""
    return untuned.fitted is not None and untuned.fitted + untuned.nats[-1] / untuned.counted - guessed > MEMORISED


def _notes_of_data(problem: Problem) -> Iterator[str]:
    """Yield sentences about the number of unseen examples."""
    if (unseen := sum(problem.chunks.sizes[1:])) < FEW:
        yield f"{unseen} unseen examples judged the trainings; with so few, the choice is close to a guess."
    if (numbers := sum(p.numel() for module in problem.direct for p in module.parameters())) > MANY * unseen:
        yield (
            f"{numbers} numbers learned by gradient descent from {unseen} unseen examples, which judged them too: L_ML"
            " is higher than it would be on other data."
        )


def notes_of_choice(problem: Problem, history: list[Trial], chosen: Tensor) -> Iterator[str]:
    """Yield sentences about the limits of a search; `chosen`: the positions of the chosen values in their ranges."""
    if (name := name_of(problem.loss)) in OTHERS:
        yield (
            f"{name} is no negative log-likelihood in nats, so that its scale decides how closely the choice follows"
            " the best training; a squared error counts by its logarithm."
        )
    ends = [trial.late for trial in history if math.isfinite(trial.late)]
    if len(ends) > 1 and max(ends) - min(ends) < 1:
        yield "Unseen data do not tell the trainings of the search apart: all are within 1 nat."
    if len(ends) < len(history):
        yield f"{len(history) - len(ends)} of {len(history)} trainings of the search had no finite loss."
    for setting, position in zip(problem.settings, chosen.tolist(), strict=True):
        tried = [trial.values[setting.name] for trial in history]
        best = [value for value, trial in zip(tried, history, strict=True) if trial.weight > 0.5]
        ends = {min(tried), max(tried)} - {setting.untuned}
        if setting.factor != MAIN and (at_end := [value for value in best if value in ends]):
            yield f"{setting.name} was best at the end of what was tried; pass {at_end[0]:.3g} and tune it again."
        if position > 0.9 and setting.position < 0.9:
            yield f"{setting.name} is close to the upper end of its range, {setting.high:g}."


def _notes_of_end(
    problem: Problem, confirmed: Trial, end: int, schedule: dict[str, list[float]], averaged: float | None
) -> Iterator[str]:
    """Yield sentences about the training at the chosen values and about the final one."""
    nats = confirmed.nats
    if problem.starts and learning_steps(problem.steps)[1] < UPDATES:
        yield "Widths of augmentations learn in so few steps only a little, and begin narrow; pass more steps."
    for setting in (start for start in problem.starts if start.name in schedule):
        before, last = schedule[setting.name][-2:]
        if abs(last - before) > STILL * (setting.high - setting.low):
            yield f"{setting.name} still changed by {last - before:+.3g} in the last tenth; pass more steps."
    if averaged is not None and nats[-1] - averaged > 1:
        yield (
            f"Predictions by the mean over {AVERAGED} augmented copies have a higher L_ML, by"
            f" {nats[-1] - averaged:.1f} nats: result.averaged({AVERAGED}), at {AVERAGED} times the time."
        )
    if end < len(nats):
        steps = due(problem.steps)[end - 1]
        yield f"L_ML was best after {steps} of {problem.steps} steps, at which the final training ended."
    elif len(nats) > 1 and nats[-2] - nats[-1] > max(1.0, 0.02 * abs(nats[-1])):
        risen = nats[-2] - nats[-1]
        yield f"L_ML still rose by {risen:.1f} nats in the last tenth of the steps: more steps may be better."
