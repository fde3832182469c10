"""tune: a trained network from a network, data and the names of hyperparameters, in one call."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from partkernels.arguments import check_seed
from partnets.data.batch import Forward, call
from partnets.data.dataset import Data
from partnets.data.examples import Collate
from partnets.data.normalise import ToFloat
from partnets.hyper import Hyperparameter
from partnets.tuning.notes import (
    AVERAGED,
    notes_of_choice,
    notes_of_cost,
    notes_of_data,
    notes_of_end,
    notes_of_guessing,
    notes_of_starts,
)
from partnets.tuning.preflight import is_same, signature, try_steps
from partnets.tuning.problem import Optimizer, Problem, Scheduler, check_functions, make_problem
from partnets.tuning.result import Trial, Tuned
from partnets.tuning.search import Plan, best_end, choose, design, lowest, no_better, plan
from partnets.tuning.training import LEARNED, STARTS, Training, due, learning_cost
from partnets.utils import random_state
from partnets.utils.files import replacing
from partnets.utils.losses import Loss
from partnets.utils.modules import modes_kept
from partnets.utils.seeds import derived

LOG = logging.getLogger("partnets")
# The smallest batch of a network with batch normalisation; statistics of fewer examples are too noisy.
NORMALISED = 4
# A training has memorised its examples if, relative to a guess, it predicts unseen ones worse by this many nats per
# target. Small transformers that had learned nothing were at .07 at most, regressions of noise or of a weak signal at
# .07 to .16 and more.
MEMORISED = 0.1

Callback = Callable[[Training], None]


def tune(
    network: nn.Module,
    data: Data | Dataset[Any] | Sequence[Any],
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
    resume_from: str | os.PathLike[str] | None = None,
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
    path = None if resume_from is None else Path(resume_from)
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        check_functions(callbacks=callback)
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
    norms = [module for module in network.modules() if isinstance(module, _NormBase)]
    # Frozen ones stay in evaluation mode.
    least = NORMALISED if any(norm.training or not network.training for norm in norms) else 1
    unseen = sum(problem.chunks.sizes[1:])
    options = {"batch_size": batch_size, "steps": steps, "unseen": unseen, "least": least}
    planned = plan(problem.settings, budget, learning=learning_cost(problem), **options)
    problem = try_steps(problem, planned)
    return _Search(problem, planned, seed, callbacks, path).run(budget)


class _Search:
    """All trainings of one call, in order, saved to a file after each tenth of each."""

    def __init__(
        self, problem: Problem, planned: Plan, seed: int, callbacks: list[Callback], path: Path | None
    ) -> None:
        self.problem, self.plan, self.seed, self.callbacks, self.path = problem, planned, seed, callbacks, path
        self.finished: list[Trial] = []
        # The state of an interrupted training.
        self.present: dict[str, Any] | None = None
        # The values that modules learned by gradient descent, by the number of the training.
        self.schedules: dict[int, dict[str, Tensor]] = {}
        if path is not None:
            self.identity, self.signature = f"{problem.identity} {planned} {seed}", signature(problem)
            if path.exists():
                self._load(path)

    def run(self, budget: float) -> Tuned:
        """Run the remaining trainings: of the search, at the chosen values, and the final one."""
        problem, planned = self.problem, self.plan
        points, factors = torch.zeros(0, 0, device="cpu"), []
        if problem.settings:
            points, factors = design(problem.settings, planned.levels, derived(self.seed, "design"))
        total = len(points) * planned.member_batch + planned.confirm_batch + problem.batch_size
        form = "{desc} |{bar}| {percentage:.0f} % of the budget, {elapsed}, {remaining} left{postfix}"
        with tqdm(total=total / problem.batch_size, disable=None, bar_format=form) as self.bar:
            tried = [self._search(number, point) for number, point in enumerate(points)]
            chosen, weights = torch.zeros(0, device="cpu"), torch.zeros(0, device="cpu")
            if problem.settings:
                chosen, weights = choose(points, factors, torch.tensor([one.nats for one in tried], device="cpu"))
            confirmed, start, harm = self._confirm(chosen, tried)
            guessing = no_better(confirmed.guessed, [one.nats for one in (*tried, confirmed)])
            memorised = guessing and bool(tried) and _has_memorised(tried[0], confirmed)
            unlearned = guessing and bool(tried) and not memorised
            end = len(confirmed.nats) if unlearned else best_end(confirmed.nats)
            steps = due(problem.steps)[end - 1]
            learned = self.schedules[self.finished.index(confirmed)]
            final = self._final(points[0] if unlearned else chosen, steps, learned)
        history = [dataclasses.replace(one, weight=float(w)) for one, w in zip(tried, weights, strict=True)]
        schedule, augmentation = self._learned(final, end), _augmentation(final)
        values = history[0].values if unlearned else confirmed.values
        cost = sum(trial.cost for trial in self.finished) + self._cost(final)
        notes = [
            *([notes_of_guessing(problem, unlearned, memorised)] if guessing else ()),
            *notes_of_data(problem, confirmed.counted),
            *(() if unlearned else notes_of_choice(problem, history, chosen)),
            *notes_of_starts(start, harm),
            *notes_of_end(problem, confirmed, end, schedule, averages=augmentation is not None),
            *notes_of_cost(cost, budget),
        ]
        for note in notes:
            LOG.info("%s", note)
        return Tuned(
            values=values | {name: numbers[-1] for name, numbers in schedule.items()},
            model=final.deployed(),
            lml=-(tried[0] if unlearned else confirmed).nats[end - 1],
            counted=confirmed.counted,
            steps=steps,
            schedule=schedule,
            history=history,
            confirmed=confirmed,
            cost=cost,
            notes=notes,
            augmentation=augmentation,
        )

    def _search(self, number: int, point: Tensor) -> Trial:
        """Return a training of the search, from the file if it has finished before an interruption."""
        batch_size = self.plan.member_batch
        if number < len(self.finished):
            return self._skip(number, batch_size)
        name = f"search {number + 1}"
        training = self._train(name, point, batch_size, derived(self.seed, "search"))
        fitted = training.fitted() if number == 0 else None
        return self._finish(name, training, point, fitted=fitted)

    def _confirm(self, point: Tensor, tried: list[Trial]) -> tuple[Trial, float, bool]:
        """Return the best training at the chosen values, where its augmentations start, and whether they do harm.

        If unseen data are predicted better without augmentations, by a training of the search or by a guess, they start
        again from smaller widths; the third time only if the search was better than a guess. The search has smaller
        batches, which predict worse, so if a width shrank from the first start, all start again as they were learned.
        """
        found, starts, left = [], [], list(STARTS if self.problem.starts else STARTS[:1])
        searched = min((lowest(trial.nats) for trial in tried), default=math.inf)
        while left:
            if found:
                self.bar.total += self.plan.confirm_batch / self.problem.batch_size
            starts.append(left.pop(0))
            found.append(self._confirm_from(starts[-1], len(tried) + len(found), point))
            guessed = math.inf if found[0].guessed is None else found[0].guessed
            if lowest(found[-1].nats) < min(searched, guessed):
                left = [LEARNED] if found[-1].shrank and len(found) == 1 else []
            elif len(found) > 1 and guessed <= searched:
                break
        # If no training tells more than a guess, the narrowest augmentations do the least harm.
        is_guess = no_better(found[0].guessed, [trial.nats for trial in found])
        best = found[-1] if is_guess else min(found, key=lambda trial: lowest(trial.nats))
        if starts[-1] == LEARNED and no_better(lowest(found[0].nats), [best.nats]):
            best = found[0]
        harm = bool(self.problem.starts) and searched < lowest(best.nats)
        return best, starts[found.index(best)], harm

    def _confirm_from(self, start: float, number: int, point: Tensor) -> Trial:
        batch_size = self.plan.confirm_batch
        if number < len(self.finished):
            return self._skip(number, batch_size)
        learned = {name: rows[-1] for name, rows in self.schedules[number - 1].items()} if start == LEARNED else {}
        options = {"learns": bool(self.problem.direct), "start": start, "learned": learned}
        training = self._train("chosen", point, batch_size, derived(self.seed, "confirm"), **options)
        averaged = training.averaged_nats(AVERAGED) if training.direct and training.augmenting else None
        measured = {"guessed": training.guessed_nats(), "shrank": training.shrank()}
        return self._finish("chosen", training, point, averaged=averaged, **measured)

    def _final(self, point: Tensor, steps: int, schedule: dict[str, Tensor]) -> Training:
        options = {"batch_size": self.problem.batch_size, "seed": derived(self.seed, "final"), "steps": steps}
        training = Training(self.problem, point.tolist(), everything=True, schedule=schedule, **options)
        self._fit("final training", training)
        self.bar.update(self.bar.total - self.bar.n)
        return training

    def _train(self, name: str, point: Tensor, batch_size: float, seed: int, **options: Any) -> Training:
        options |= {"steps": self.problem.steps, "unseen": self.plan.unseen}
        training = Training(self.problem, point.tolist(), batch_size=batch_size, seed=seed, **options)
        self._fit(name, training)
        return training

    def _skip(self, number: int, batch_size: float) -> Trial:
        self._advance(batch_size / self.problem.batch_size)
        return self.finished[number]

    def _finish(self, name: str, training: Training, point: Tensor, **found: float | bool | None) -> Trial:
        learned = training.schedule.items()
        self.schedules[len(self.finished)] = {name: torch.stack(rows) for name, rows in learned}
        pairs = zip(self.problem.settings, point.tolist(), strict=True)
        values = {setting.name: setting.value(position) for setting, position in pairs}
        nats, cost = list(training.judged), self._cost(training)
        self.finished.append(Trial(values, nats, training.batch_size, cost, training.counted, **found))
        LOG.info("%s: %.1f nats at %s", name, nats[-1], values)
        return self.finished[-1]

    def _advance(self, share: float) -> None:
        """Advance the bar by a part of the budget; stop at its end, which a rounded sum may exceed."""
        self.bar.update(min(share, self.bar.total - self.bar.n))

    def _fit(self, name: str, training: Training) -> None:
        self.bar.set_description_str(name)
        if self.present is not None:
            training.load_state(self.present)
            self.present = None
        for until in training.due:
            if training.done >= until:
                continue
            training.run(until)
            self._advance(training.batch_size / self.problem.batch_size / len(training.due))
            if training.judged:
                self.bar.set_postfix_str(f"L_ML {-training.judged[-1]:.1f}")
            for callback in self.callbacks:
                with random_state.preserved(self.problem.device), modes_kept(training.network):
                    callback(training)
            if self.path is not None:
                self._save(self.path, training)

    def _cost(self, training: Training) -> float:
        return training.examples / (self.problem.steps * self.problem.batch_size)

    @torch.no_grad()
    def _learned(self, final: Training, end: int) -> dict[str, list[float]]:
        """Return the values of numbers that learned by gradient descent, at the start and after each tenth."""
        found = {}
        for row in range(min(end + 1, len(final.times))):
            for parameter, values in final.repeated.items():
                parameter.copy_(values[row])
            for module in final.learning:
                for name, value in module.values().items():
                    found.setdefault(name, []).append(value)
        return found

    def _save(self, path: Path, training: Training) -> None:
        kept = {"identity": self.identity, "signature": self.signature, "schedules": self.schedules}
        kept |= {"finished": [vars(trial) for trial in self.finished], "present": training.state()}
        with replacing(path, binary=True) as file:
            torch.save(kept, file)

    def _load(self, path: Path) -> None:
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
            is_own = kept["identity"] == self.identity and is_same(kept["signature"], self.signature)
        except Exception as error:  # depends on the file's content
            raise ValueError(f"resume_from={str(path)!r} is not a file of partnets.tune: {error}") from error
        if not is_own:
            raise ValueError(
                f"resume_from={str(path)!r} is of another search: the network, the data or an argument differs."
                " Pass the arguments of that search, or another path."
            )
        self.finished = [Trial(**each) for each in kept["finished"]]
        self.present, self.schedules = kept["present"], kept["schedules"]


def _augmentation(final: Training) -> nn.Module | None:
    """Return a copy of the augmentations in front of a network, or None if there is none or one is further inside."""
    layers = final.network if isinstance(final.network, nn.Sequential) else ()
    first = list(takewhile(lambda layer: layer in final.augmenting or isinstance(layer, ToFloat), layers))
    found = [getattr(layer, "module", layer) for layer in first]
    count = sum(layer in final.augmenting for layer in first)
    return copy.deepcopy(nn.Sequential(*found)) if found and count == len(final.augmenting) else None


def _has_memorised(untuned: Trial, confirmed: Trial) -> bool:
    """Return whether an untuned training memorised its examples, relative to a guess for unseen targets."""
    guessed = confirmed.guessed / confirmed.counted
    return untuned.fitted is not None and untuned.fitted + untuned.nats[-1] / untuned.counted - guessed > MEMORISED
