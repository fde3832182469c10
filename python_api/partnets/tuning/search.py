"""The search: the values to try, the choice among them by unseen data, and the end of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.tuning.settings import Setting

# How often unseen data judge a training.
JUDGEMENTS = 10
# The share of a search that judgements may take; but this many unseen examples judge, if there are as many.
JUDGED, FEWEST = 0.25, 100
# The factor of most settings.
MAIN = "regularisers"
# How far points of a design lie from its ladder at most, as a fraction of the ladder.
JITTER = 0.25
# A training ends early only if its end is worse than its best state by more nats than that.
CLEAR = 1.0
# The prior probability that a whole training is best. On Friedman's problem with 20 unseen examples, .5 and no prior
# lost as much with a squared error as they gained with a learned variance.
WHOLE = 0.7


@dataclass(frozen=True)
class Plan:
    """The division of a budget among trainings.

    Attributes:
        levels: the number of values of each factor that are tried, besides an untuned training.
        member_batch: the batch size of each training of the search, in the mean.
        confirm_batch: that of the training at the chosen values.
        unseen: how many unseen examples judge each time.
    """

    levels: dict[str, int]
    member_batch: float
    confirm_batch: float
    unseen: int

    @property
    def members(self) -> int:
        """The number of trainings of the search."""
        return 1 + sum(self.levels.values())


def plan(
    settings: Sequence[Setting],
    budget: float,
    *,
    batch_size: int,
    steps: int,
    unseen: int,
    learning: float = 0.0,
    least: int = 1,
) -> Plan:
    """Divide a budget, in trainings of full batches, among the trainings of a search.

    The final training takes 1. Half of the rest, but at most 1, is a training at the chosen values with smaller
    batches; the other half are judgements, and trainings at different values with smaller batches still. All have as
    many steps as the final training: with fewer steps little regularisation always looks best.

    Args:
        settings: the numbers that are searched.
        budget: more than 1.
        batch_size, steps: of the final training.
        unseen: how many unseen examples there are.
        learning: the share that gradient descent of hyperparameters adds to the cost of the training at the chosen
            values; it comes off both halves.
        least: the smallest batch that the network takes.

    Raises:
        ValueError: the budget is too small.

    Example:
        >>> decay = Setting("weight_decay", 1e-6, 1.0, lambda training, value: None, logarithmic=True)
        >>> plan([decay], 2.0, batch_size=64, steps=1000, unseen=50)
        Plan(levels={'regularisers': 3}, member_batch=7.79..., confirm_batch=32.0, unseen=50)
    """
    confirming = min(1.0, (budget - 1) / (1 + learning + bool(settings)))
    searching = budget - 1 - confirming * (1 + learning)
    confirm_batch = confirming * batch_size
    for fewer in (0, 1):
        levels = {
            factor: (3 if factor == MAIN else 2) + 2 * (searching >= 1) - fewer
            for factor in dict.fromkeys(setting.factor for setting in settings)
        }
        members = 1 + sum(levels.values())
        # A forward pass is a third of a step.
        each = JUDGEMENTS * (members + 1) / (3 * steps * batch_size)
        judging = min(unseen, max(FEWEST, int(JUDGED * searching / each)))
        training = searching - min(judging * each, JUDGED * searching)
        member_batch = training * batch_size / members
        if member_batch >= least:
            break
    if (settings and member_batch < least) or confirm_batch < least:
        shares = 1 + learning + bool(settings)
        needed = math.ceil(10 * (1 + shares * least / batch_size * (members / (1 - JUDGED) if settings else 1))) / 10
        search = f"{members} trainings of the search" if settings else "the training before the final one"
        raise ValueError(
            f"budget={budget:g} with batch_size={batch_size} leaves batches of fewer than {least} examples for"
            f" {search}; pass a budget of {needed:g} or more, or larger batches."
        )
    return Plan(levels, member_batch, confirm_batch, judging)


def design(settings: Sequence[Setting], levels: Mapping[str, int], seed: int) -> tuple[Tensor, list[str]]:
    """Return the values to try: an untuned training, and for each factor a ladder from light to heavy ones.

    Most settings regularise, so that the first question is how strongly. Each point of a ladder is moved by up to
    JITTER of its length, by a scrambled Sobol sequence; settings of other factors are untuned there.

    Returns:
        Positions in the ranges, [members, settings], and the factor of each row; the first one is untuned.

    Example:
        >>> decay = Setting("weight_decay", 1e-6, 1.0, lambda training, value: None, logarithmic=True)
        >>> points, factors = design([decay], {"regularisers": 3}, seed=0)
        >>> points.shape, factors
        (torch.Size([4, 1]), ['', 'regularisers', 'regularisers', 'regularisers'])
    """
    untuned = torch.tensor([setting.position for setting in settings], device="cpu")
    engine = torch.quasirandom.SobolEngine(len(settings), scramble=True, seed=seed)
    rows, factors = [untuned], [""]
    for factor, count in levels.items():
        for j, noise in enumerate(engine.draw(count) - 0.5):
            row, firsts = untuned.clone(), {}
            for i, setting in enumerate(settings):
                if setting.factor != factor:
                    continue
                # One number moves all of a group, and each of its settings a little.
                first = firsts.setdefault(setting.group or setting.name, i)
                moved = float(noise[first]) + (float(noise[i]) / 2 if first != i else 0.0)
                light, heavy = setting.usual
                level = j / (count - 1) if count > 1 else 0.5
                row[i] = light + (heavy - light) * level + 2 * JITTER * (heavy - light) * moved
            rows.append(row.clamp(0.0, 1.0))
            factors.append(factor)
    return torch.stack(rows), factors


def smoothed(judged: Tensor) -> Tensor:
    """Return the mean of each judgement and its neighbours, [..., judgements]."""
    padded = torch.cat([judged[..., :1], judged, judged[..., -1:]], -1)
    return (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3


def choose(points: Tensor, factors: Sequence[str], judged: Tensor) -> tuple[Tensor, Tensor]:
    """Choose values from how unseen data judged trainings at different values.

    For each factor they are the mean of its trainings and the untuned one, weighted by how likely these make unseen
    data: see weights.

    Args:
        points: positions, [members, settings].
        factors: of each training, as `design` gives them.
        judged: nats of unseen data, [members, judgements].

    Returns:
        The chosen position, [settings], and the weight of each training within its factor, [members]; of the untuned
        one the smallest.

    Raises:
        FloatingPointError: no training has a finite loss.

    Example:
        >>> points, judged = torch.tensor([[0.0], [1.0]]), torch.tensor([[50.0] * 10, [50.0] * 10])
        >>> choose(points, ["", "regularisers"], judged)[0]
        tensor([0.5000])
    """
    if not _late(judged).isfinite().any():
        raise FloatingPointError(
            "no training of the search has a finite loss; look for NaN in data and weights, lower the learning rate, or"
            " pass clip=1.0, or a larger budget or batch_size: batches of few examples have no variance, for example."
        )
    chosen, found = points[0].clone(), torch.zeros(len(points), dtype=torch.float64, device="cpu")
    found[0] = 1.0
    for factor in dict.fromkeys(factors[1:]):
        rows = [0, *(i for i, each in enumerate(factors) if each == factor)]
        if not _late(judged[rows]).isfinite().any():
            continue
        own = weights(judged[rows])
        chosen += (own[:, None] * (points[rows] - points[0])).sum(0).to(chosen.dtype)
        found[rows[1:]], found[0] = own[1:], min(float(found[0]), float(own[0]))
    return chosen, found


def _late(judged: Tensor) -> Tensor:
    """Return the mean nats of each training over its second half, [members]."""
    return judged.double()[:, judged.shape[1] // 2 :].mean(1)


def weights(judged: Tensor) -> Tensor:
    """Return how much each training counts, [members], with a sum of 1.

    The weight is exp(-nats / T) of the mean over the second half of a training, for T = 1 a posterior under a uniform
    prior (L_ML is an estimate of the log marginal likelihood). T is the standard deviation of a judgement's noise, if
    that is more than 1: the best of a few noisy numbers is not the best training. The first half does not count: it
    favours little regularisation.

    Args:
        judged: nats of unseen data, [members, judgements].

    Example:
        >>> weights(torch.tensor([[10.0] * 4, [12.0] * 4]))
        tensor([0.8808, 0.1192], dtype=torch.float64)
    """
    nats = _late(judged)
    nats = nats.masked_fill(~nats.isfinite(), math.inf) / _noise(judged)
    return (nats[nats.isfinite()].min() - nats).softmax(0)


def _noise(judged: Tensor) -> float:
    """Return the standard deviation of a judgement's noise, but at least 1."""
    # From one judgement to the next little is learned in the second half, so that most of their difference is noise.
    late = judged.double()[:, judged.shape[1] // 2 :]
    changes = late.diff(dim=1)[late.isfinite().all(1)]
    known = changes.shape[1] > 1 and len(changes)
    return max(1.0, float(changes.std(1).median()) / math.sqrt(2)) if known else 1.0


def no_better(guessed: float | None, judged: Sequence[Sequence[float]]) -> bool:
    """Return whether no training is clearly better than the best prediction that is the same for all examples.

    Then the search says nothing of how well values would serve a network that learns: the heaviest regularisation
    guesses best.

    Args:
        guessed: nats of that prediction, or None if they are not known.
        judged: nats of each training at each judgement.

    Example:
        >>> no_better(69.3, [[70.0, 69.5, 69.2, 69.1]]), no_better(69.3, [[70.0, 60.0, 50.0, 45.0]])
        (True, False)
    """
    if guessed is None:
        return False
    nats = torch.tensor(judged, dtype=torch.float64, device="cpu")
    return not bool((smoothed(nats) < guessed - max(CLEAR, _noise(nats))).any())


def best_end(judged: Sequence[float]) -> int:
    """Return the judgement, from 1, at which a training should end.

    The last one, unless it is worse than the best by more than CLEAR nats. Then the mean of the judgements' numbers,
    weighted by exp(-nats) times a prior of WHOLE for the last one: the best of ten noisy numbers is often too early.

    Example:
        >>> best_end([90.0, 50.0, 40.0, 50.0, 80.0, 90.0]), best_end([9.0, 5.0, 4.0, 4.2, 4.1, 4.0])
        (3, 6)
    """
    nats = smoothed(torch.tensor(list(judged), dtype=torch.float64, device="cpu"))
    if not nats[-1] - nats.min() > CLEAR:
        return len(judged)
    prior = torch.full_like(nats, (1 - WHOLE) / (len(judged) - 1))
    prior[-1] = WHOLE
    weights = (prior.log() - nats + nats.min()).softmax(0)
    return round(float((weights * torch.arange(1, len(judged) + 1, dtype=torch.float64, device="cpu")).sum()))
