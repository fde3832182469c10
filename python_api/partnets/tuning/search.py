"""The search: the values to try, the choice among them by unseen data, and the end of the final training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.tuning.hyperparameters import MAIN, Setting

# Number of judgements of a training by unseen data.
JUDGEMENTS = 10
# The share of a search's cost for judgements, and the number of unseen examples that judge regardless, if available.
JUDGED, FEWEST = 0.25, 100
# Largest distance of a design's points from its ladder, as a fraction of the ladder.
JITTER = 0.25
# A training ends early only if its last loss exceeds its lowest by more nats than this.
CLEAR = 1.0
# The prior probability that a training at full length is best. On Friedman's problem with 20 unseen examples, .5 and no
# prior lost as much with a squared error as they gained with a learned variance.
WHOLE = 0.7


@dataclass(frozen=True)
class Plan:
    """The division of a budget among trainings.

    Attributes:
        levels: the number of values tried for each factor, besides an untuned training.
        member_batch: the mean batch size of each training in the search.
        confirm_batch: the mean batch size of the training at the chosen values.
        unseen: the number of unseen examples in each judgement.
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

    The final training costs 1. Half of the rest, but at most 1, goes to a training at the chosen values with smaller
    batches. The other half goes to judgements, and to trainings at different values with even smaller batches. All have
    as many steps as the final training: with fewer steps, little regularisation always looks best.

    Args:
        batch_size, steps: those of the final training.
        unseen: the number of unseen examples.
        learning: the share that gradient descent of hyperparameters adds to the cost of the training at the chosen
            values; it is subtracted from both halves.
        least: the smallest batch size that the network accepts.

    Raises:
        ValueError: the budget is too small.
    """
    confirming = min(1.0, (budget - 1) / (1 + learning + bool(settings)))
    searching = budget - 1 - confirming * (1 + learning)
    confirm_batch = confirming * batch_size
    factors = dict.fromkeys(setting.factor for setting in settings)
    for further in (2, 1, 0, -1) if searching >= 1 else (0, -1):
        levels = {factor: (3 if factor == MAIN else 2) + further for factor in factors}
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
    """Return the values to try: an untuned training, and for each factor a ladder from light to heavy values.

    Most settings regularise, so the main question is how strongly. A scrambled Sobol sequence moves each point of a
    ladder by up to JITTER of its length; settings of other factors are untuned there.

    Returns:
        Positions in the ranges, [members, settings], and the factor of each row; the first row is untuned.
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
                # One number moves all settings of a group, and a second one moves each of them slightly.
                first = firsts.setdefault(setting.group or setting.name, i)
                moved = float(noise[first]) + (float(noise[i]) / 2 if first != i else 0.0)
                light, heavy = setting.usual
                level = j / (count - 1) if count > 1 else 0.5
                row[i] = light + (heavy - light) * level + 2 * JITTER * (heavy - light) * moved
            rows.append(row.clamp(0.0, 1.0))
            factors.append(factor)
    return torch.stack(rows), factors


def choose(points: Tensor, factors: Sequence[str], judged: Tensor) -> tuple[Tensor, Tensor]:
    """Choose values by the judgements of trainings at different values.

    For each factor, the choice is the mean over its trainings and the untuned one, weighted by the likelihood of unseen
    data: see weights.

    Args:
        points: positions, [members, settings].
        factors: the factor of each training, from `design`.
        judged: nats of unseen data, [members, judgements].

    Returns:
        The chosen position, [settings], and the weight of each training within its factor, [members]; for the untuned
        training, the smallest over factors.

    Raises:
        FloatingPointError: no training has a finite loss.
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
    """Return the weight of each training, [members], with a sum of 1, by its nats, [members, judgements].

    The weight is exp(-nats / T), with the mean nats over the second half of a training. For T = 1 it is a posterior
    under a uniform prior, as L_ML estimates the log marginal likelihood. T is the standard deviation of a judgement's
    noise, if that exceeds 1, because the lowest of a few noisy numbers is not the best training. The first half is
    ignored, as it favours little regularisation.
    """
    nats = _late(judged)
    nats = nats.masked_fill(~nats.isfinite(), math.inf) / _noise(judged)
    return (nats[nats.isfinite()].min() - nats).softmax(0)


def _noise(judged: Tensor) -> float:
    """Return the standard deviation of a judgement's noise, at least 1."""
    # In the second half little is learned between judgements, so their differences are mostly noise.
    late = judged.double()[:, judged.shape[1] // 2 :]
    changes = late.diff(dim=1)[late.isfinite().all(1)]
    known = changes.shape[1] > 1 and len(changes)
    return max(1.0, float(changes.std(1).median()) / math.sqrt(2)) if known else 1.0


def _smoothed(judged: Tensor) -> Tensor:
    """Return the mean of each judgement and its neighbours, [..., judgements]."""
    padded = torch.cat([judged[..., :1], judged, judged[..., -1:]], -1)
    return (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3


def no_better(guessed: float | None, judged: Sequence[Sequence[float]]) -> bool:
    """Return whether no training is clearly better than the best constant prediction, with `guessed` nats if known.

    The search is then uninformative about values for a network that learns: the heaviest regularisation comes closest
    to the constant prediction.
    """
    if guessed is None:
        return False
    nats = torch.tensor(judged, dtype=torch.float64, device="cpu")
    return not bool((_smoothed(nats) < guessed - max(CLEAR, _noise(nats))).any())


def lowest(judged: Sequence[float]) -> float:
    """Return the lowest loss of a training, smoothed over neighbouring judgements."""
    return float(_smoothed(torch.tensor(list(judged), dtype=torch.float64, device="cpu")).min())


def best_end(judged: Sequence[float]) -> int:
    """Return the number of the judgement, from 1, at which a training should end.

    This is the last one, unless its loss exceeds the lowest by more than CLEAR nats. In that case it is the mean number
    of a judgement, weighted by exp(-nats) times a prior of WHOLE for the last one: the lowest of ten noisy losses often
    comes too early.
    """
    nats = _smoothed(torch.tensor(list(judged), dtype=torch.float64, device="cpu"))
    if not nats[-1] - nats.min() > CLEAR:
        return len(judged)
    prior = torch.full_like(nats, (1 - WHOLE) / (len(judged) - 1))
    prior[-1] = WHOLE
    weights = (prior.log() - nats + nats.min()).softmax(0)
    return round(float((weights * torch.arange(1, len(judged) + 1, dtype=torch.float64, device="cpu")).sum()))
