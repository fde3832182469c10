"""Schedules: hyperparameters that training is given step by step instead of learning them.

baselines.bilevel(..., method="fixed") takes a schedule as hyper, or a tensor for constant values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partnets.hyper.ranges import Range, real
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived

# A function from the step, counted from 0, to hyper.
Schedule = Callable[[int], Tensor]


def gaussian(hyper: Tensor, *, std: float = 0.05, range: Range = real, seed: int = 0) -> Schedule:
    """Return a schedule with independent Gaussian noise on the values (MacKay et al. 2019, Section 5.1).

    Args:
        hyper: [n], unconstrained.
        std: standard deviation of the noise on the values, range.transform(hyper), which are clamped to the range.
        range: a range of partnets.hyper, such as hyper.probability; by default the noise is added to hyper itself.
        seed: seed of the noise, which is a function of seed and step.

    Returns:
        A function from the step, counted from 0, to hyper, unconstrained.

    Raises:
        ValueError: std is below 0.

    Example:
        >>> from partnets import hyper
        >>> schedule = gaussian(torch.zeros(3), range=hyper.probability)
        >>> bool((schedule(7).sigmoid() - 0.5).abs().max() < 0.3)
        True
    """
    _check_size("std", std)

    def noise(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived(seed, f"step {step}"))
        return std * torch.randn(hyper.shape, generator=generator, device="cpu").to(hyper)

    return _moved(hyper, range, noise)


def sinusoid(hyper: Tensor, *, amplitude: float = 0.1, period: int = 1200, range: Range = real) -> Schedule:
    """Return a schedule of the values plus amplitude * sin(2π step / period) (MacKay et al. 2019, Section 5.1).

    Args:
        hyper, range: as in gaussian.
        amplitude: amplitude in units of the values.
        period: number of steps.

    Returns:
        As in gaussian.

    Raises:
        ValueError: amplitude is below 0 or period below 1.

    Example:
        >>> schedule = sinusoid(torch.zeros(1), period=4)
        >>> [round(schedule(step).item(), 3) for step in (0, 1, 2, 3)]
        [0.0, 0.1, 0.0, -0.1]
    """
    _check_size("amplitude", amplitude)
    check_at_least(1, period=period)
    return _moved(hyper, range, lambda step: amplitude * math.sin(2 * math.pi * step / period))


def recorded(values: Tensor | Sequence[Tensor], *, every: int = 1, range: Range = real) -> Schedule:
    """Return a schedule of recorded values, such as baselines.bilevel's or a History's; the last one is repeated.

    Args:
        values: [m, n], in the range; baselines.bilevel returns them unconstrained, for which the range is real.
        every: number of steps for each value.
        range: a range of partnets.hyper, that of the hyperparameter in a History.

    Returns:
        As in gaussian.

    Raises:
        ValueError: there are no values, or every is below 1.

    Example:
        >>> schedule = recorded(torch.tensor([[0.0], [1.0]]), every=2)
        >>> [schedule(step).item() for step in range(6)]
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
        >>> from partnets import hyper
        >>> schedule = recorded(torch.tensor([[0.2], [0.3]]), range=hyper.probability)  # history.values["1.rate"]
        >>> round(schedule(1).sigmoid().item(), 3)
        0.3
    """
    check_at_least(1, every=every)
    if not len(values):
        raise ValueError("there are no values; pass at least one, [m, n].")
    for value in values if range is not real else ():
        for number in value.reshape(-1).tolist():
            range.check("values", number)
    return lambda step: range.transform.inv(values[min(step // every, len(values) - 1)])


def _moved(hyper: Tensor, range: Range, change: Callable[[int], Tensor | float]) -> Schedule:
    value = range.transform(hyper.detach())
    # The borders are excluded, and the softplus has no inverse at 0.
    low, high = range.low + torch.finfo(value.dtype).tiny, range.high
    return lambda step: range.transform.inv((value + change(step)).clamp(low, high))


def _check_size(name: str, size: float) -> None:
    if not 0 <= size < math.inf:
        raise ValueError(f"{name}={size}; pass a finite number of at least 0.")
