"""Notes: sentences about the limits of a result of partnets.tune."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from partnets.tuning.hyperparameters import MAIN
from partnets.tuning.problem import Problem
from partnets.tuning.result import Trial
from partnets.tuning.training import LEARNED, STARTS, UPDATES, due, learning_steps
from partnets.utils.losses import DISTANCES, NO_LIKELIHOODS, SQUARED, name_of

# Number of augmented copies in the note about averaged predictions.
AVERAGED = 8
# A note reports a width that changed in the last tenth of a training by more than this share of its range.
STILL = 0.05
# A note reports fewer unseen examples than this.
FEW = 20
# A note reports if more numbers learned from the unseen examples than this share of these examples.
MANY = 0.5
# A note reports that the strongest regularisation was the best if its weight is above this.
SURE = 0.9
# A note reports a cost above this multiple of the budget.
OVER = 1.1
GUESSING = "No training of the search predicted unseen data better than a guess that is the same for all"
UNLEARNED = "; the values are those of an untuned training. Pass more steps or a larger budget"
UNSCALED = ", or standardise the targets"
MEMORY = ", and an untuned one learns its own examples by heart"
WEAK = ". The data say little of the targets, the network does not fit them, or the steps are too few."


def notes_of_guessing(problem: Problem, unlearned: bool, memorised: bool) -> str:
    """Return a sentence for trainings that predict no better than a constant."""
    if not unlearned:
        return GUESSING + MEMORY * memorised + WEAK
    return f"{GUESSING}{UNLEARNED}{UNSCALED * (name_of(problem.loss) in DISTANCES)}."


def notes_of_data(problem: Problem, counted: int) -> Iterator[str]:
    """Yield sentences about the number of unseen examples, and of their targets that count."""
    unseen = sum(problem.chunks.sizes[1:])
    if min(unseen, counted) < FEW:
        what = "examples" if unseen <= counted else "targets"
        yield f"{min(unseen, counted)} unseen {what} judged the trainings; with so few, the choice is close to a guess."
    learning = [parameter for path in problem.direct for parameter in problem.network.get_submodule(path).parameters()]
    if (numbers := sum(parameter.numel() for parameter in learning)) > MANY * unseen:
        yield (
            f"{numbers} numbers learned by gradient descent from {unseen} unseen examples, which judged them too: L_ML"
            " is higher than it would be on other data."
        )


def notes_of_choice(problem: Problem, history: list[Trial], chosen: Tensor) -> Iterator[str]:
    """Yield sentences about the limits of a search; `chosen`: the positions of the chosen values in their ranges."""
    if (name := name_of(problem.loss)) in NO_LIKELIHOODS - SQUARED:
        yield (
            f"{name} is no negative log-likelihood in nats, so that its scale decides how closely the choice follows"
            " the best training; a squared error counts by its logarithm."
        )
    ends = [trial.late for trial in history if math.isfinite(trial.late)]
    if len(ends) > 1 and max(ends) - min(ends) < 1:
        yield "Unseen data do not tell the trainings of the search apart: all are within 1 nat."
    if len(ends) < len(history):
        yield f"{len(history) - len(ends)} of {len(history)} trainings of the search had no finite loss."
    main = [setting for setting in problem.settings if setting.factor == MAIN]
    most = {setting.name: max(trial.values[setting.name] for trial in history) or 1.0 for setting in main}
    strongest = max(history, key=lambda trial: sum(trial.values[name] / most[name] for name in most), default=None)
    if main and strongest is not None and strongest.weight > SURE:
        yield (
            "The strongest regularisation that was tried was the best. If a stronger one is possible, such as a larger"
            " weight decay, try it with the others fixed."
        )
    for setting, position in zip(problem.settings, chosen.tolist(), strict=True):
        tried = [trial.values[setting.name] for trial in history]
        best = [value for value, trial in zip(tried, history, strict=True) if trial.weight > 0.5]
        ends = {min(tried), max(tried)} - {setting.untuned}
        if setting.factor != MAIN and (at_end := [value for value in best if value in ends]):
            yield f"{setting.name} was best at the end of what was tried; pass {at_end[0]:.3g} and tune it again."
        if position > 0.9 and setting.position < 0.9:
            yield f"{setting.name} is close to the upper end of its range, {setting.high:g}."


def notes_of_starts(start: float, harm: bool) -> Iterator[str]:
    """Yield sentences about augmentations that do harm; `start`: their initial position in their ranges."""
    if harm:
        yield (
            "Unseen data were predicted better without the augmentations that learn: leave them out, or leave out those"
            " that change a target, as by hyper.Affine(rotation=None)."
        )
    elif start == LEARNED:
        yield "Unseen data were predicted better when augmentations began at the widths that a first check had learned."
    elif start != STARTS[0]:
        yield f"Augmentations from {STARTS[0]:g} of their ranges did harm; they began at {start:g} of them."


def notes_of_end(
    problem: Problem, confirmed: Trial, end: int, schedule: dict[str, list[float]], averages: bool
) -> Iterator[str]:
    """Yield sentences about the training at the chosen values and about the final one, after judgement `end`."""
    nats = confirmed.nats
    if problem.starts and learning_steps(problem.steps)[1] < UPDATES:
        yield "Widths of augmentations learn in so few steps only a little, and begin narrow; pass more steps."
    for setting in (start for start in problem.starts if start.name in schedule):
        before, last = schedule[setting.name][-2:]
        if abs(last - before) > STILL * (setting.high - setting.low):
            yield f"{setting.name} still changed by {last - before:+.3g} in the last tenth; pass more steps."
    if averages and confirmed.averaged is not None and nats[-1] - confirmed.averaged > 1:
        yield (
            f"Predictions by the mean over {AVERAGED} augmented copies have a higher L_ML, by"
            f" {nats[-1] - confirmed.averaged:.1f} nats: result.averaged({AVERAGED}), at {AVERAGED} times the time."
        )
    if end < len(nats):
        steps = due(problem.steps)[end - 1]
        yield f"L_ML was best after {steps} of {problem.steps} steps, at which the final training ended."
    elif len(nats) > 1 and nats[-2] - nats[-1] > max(1.0, 0.02 * abs(nats[-1])):
        risen = nats[-2] - nats[-1]
        yield f"L_ML still rose by {risen:.1f} nats in the last tenth of the steps: more steps may be better."


def notes_of_cost(cost: float, budget: float) -> Iterator[str]:
    """Yield a sentence if the cost is far above the budget."""
    if cost > OVER * budget:
        yield (
            f"The cost of {cost:.2f} trainings is above the budget of {budget:g}: few steps, small batches, or further"
            " checks of augmentations."
        )
