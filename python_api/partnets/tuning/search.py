"""The search: which values are tried, what follows from how unseen data judge them, and when a training should end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partnets.tuning.settings import Setting

# Of how many trainings the choice is at least the mean, in effect. Measured on four problems: with 1.5 it was as good,
# with 3 the mean was pulled to the middle of the ranges.
LEAST_EFFECTIVE = 2.0
# How far points of a design lie from its ladder at most, as a fraction of a range.
JITTER = 0.15
# A training ends early only if its end is worse than its best state by more nats than that. On four problems 1 to 2
# were about as good; 3 lost most of what ending early gains with 20 unseen examples.
CLEAR = 1.5


@dataclass(frozen=True)
class Plan:
    """How a budget is spent.

    Attributes:
        members: the number of trainings at different values.
        member_batch: the batch size of each.
        confirm_batch: that of the training at the chosen values.
    """

    members: int
    member_batch: int
    confirm_batch: int


def plan(budget: float, batch_size: int, least: int = 1) -> Plan:
    """Divide a budget, in trainings of full batches, among the trainings of a search.

    The final training takes 1. Half of the rest, but at most 1, is a training at the chosen values with smaller
    batches; the other half are four trainings or more, at different values, with smaller batches still. All have as
    many steps as the final training: with fewer steps little regularisation always looks best.

    Args:
        budget: more than 1.
        batch_size: of the final training.
        least: the smallest batch that the network takes.

    Raises:
        ValueError: the budget is too small for two trainings at different values.

    Example:
        >>> plan(2.0, batch_size=64)
        Plan(members=4, member_batch=8, confirm_batch=32)
        >>> plan(4.0, batch_size=64)
        Plan(members=8, member_batch=16, confirm_batch=64)
    """
    confirming = min(1.0, (budget - 1) / 2)
    searching = budget - 1 - confirming
    members = 4 if searching < 0.75 else 8 if searching < 3 else 16
    members = max(2, min(members, int(searching * batch_size / least + 1e-9)))
    member_batch = int(searching * batch_size / members + 1e-9)
    confirm_batch = int(confirming * batch_size + 1e-9)
    if member_batch < least or confirm_batch < least:
        needed = 1 + 4 * least / batch_size
        raise ValueError(
            f"budget={budget:g} with batch_size={batch_size} leaves less than {least} examples for a batch of the"
            f" search; pass a budget of {needed:.2g} or more, or larger batches."
        )
    return Plan(members, member_batch, confirm_batch)


def design(settings: Sequence[Setting], members: int, seed: int) -> Tensor:
    """The values that are tried first: an untuned training, and a ladder from light to heavy ones.

    Most settings regularise, so that the first question is how strongly. Each point of the ladder is moved by up to
    JITTER of each range, by a scrambled Sobol sequence.

    Returns:
        Positions in the ranges, [members, settings]; the first row is that of an untuned training.

    Example:
        >>> decay = Setting("weight_decay", 1e-6, 1.0, lambda training, value: None, logarithmic=True)
        >>> design([decay], 4, seed=0).shape
        torch.Size([4, 1])
    """
    untuned = torch.tensor([setting.position for setting in settings])
    noise = torch.quasirandom.SobolEngine(len(settings), scramble=True, seed=seed).draw(members - 1) - 0.5
    groups: dict[str, int] = {}
    rows = [untuned]
    for j in range(members - 1):
        level = j / max(1, members - 2)
        row = []
        for i, setting in enumerate(settings):
            # One number moves all of a group, and each of its settings a little.
            first = groups.setdefault(setting.group or setting.name, i)
            moved = float(noise[j, first]) + (float(noise[j, i]) / 2 if first != i else 0.0)
            if setting.usual is None:
                position = float(untuned[i]) + 1.2 * moved
            else:
                light, heavy = setting.usual
                position = light + (heavy - light) * level + 2 * JITTER * moved
            row.append(min(max(position, 0.0), 1.0))
        rows.append(torch.tensor(row))
    return torch.stack(rows)


def smoothed(judged: Tensor) -> Tensor:
    """Means of each judgement and its neighbours, [..., judgements]."""
    padded = torch.cat([judged[..., :1], judged, judged[..., -1:]], -1)
    return (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3


def choose(points: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """The values that follow from trainings at different values: their mean, weighted by how likely unseen data are.

    A pair of a training and one of its judgements has the weight exp(-nats), a posterior under a uniform prior
    (L_ML is an estimate of the log marginal likelihood). If fewer than LEAST_EFFECTIVE trainings would count in effect,
    the nats are scaled down until as many do: the best of a few noisy numbers is not the best training. Judgements of
    the first half do not count: they favour little regularisation.

    Args:
        points: positions, [members, settings].
        judged: nats of unseen data, [members, judgements].

    Returns:
        The chosen position, [settings], and the weight of each training, [members].

    Raises:
        FloatingPointError: no training has a finite loss.

    Example:
        >>> points, judged = torch.tensor([[0.0], [1.0]]), torch.tensor([[50.0] * 10, [50.0] * 10])
        >>> choose(points, judged)[0]
        tensor([0.5000])
    """
    nats = smoothed(judged.double())[:, judged.shape[1] // 2 :]
    finite = nats.isfinite()
    if not finite.any():
        raise FloatingPointError("no training of the search has a finite loss; lower the learning rate, or pass clip.")
    nats = nats.masked_fill(~finite, math.inf)
    flat = nats.flatten() - nats[finite].min()
    least = min(LEAST_EFFECTIVE, float(finite.any(1).sum())) / len(points) * flat.isfinite().sum()

    def weights(scale: float) -> Tensor:
        return (-flat * scale).nan_to_num(nan=-math.inf).softmax(0)

    low, high = 0.0, 1.0
    if 1 / weights(1.0).square().sum() < least:
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if 1 / weights(middle).square().sum() < least else (middle, high)
        found = weights(low)
    else:
        found = weights(1.0)
    of_members = found.view(nats.shape).sum(1)
    return (of_members[:, None] * points).sum(0).to(points.dtype), of_members


def best_end(judged: Sequence[float]) -> int:
    """The judgement, from 1, at which a training should end.

    The last one, unless it is worse than the best by more than CLEAR nats. Then the mean of the judgements' numbers,
    weighted by exp(-nats): the best of ten noisy numbers is often too early.

    Example:
        >>> best_end([90.0, 50.0, 40.0, 50.0, 80.0, 90.0]), best_end([9.0, 5.0, 4.0, 4.2, 4.1, 4.0])
        (3, 6)
    """
    nats = smoothed(torch.tensor(list(judged), dtype=torch.float64))
    if not nats[-1] - nats.min() > CLEAR:
        return len(judged)
    numbers = torch.arange(1, len(judged) + 1, dtype=torch.float64)
    return round(float(((nats.min() - nats).softmax(0) * numbers).sum()))
