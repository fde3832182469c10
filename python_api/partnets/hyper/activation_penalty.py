"""ActivationPenalty and TemporalActivationPenalty: penalties on large and on changing activations."""

from __future__ import annotations

from torch import Tensor

from partnets.hyper.learned import Learned
from partnets.hyper.penalty import Penalty
from partnets.hyper.ranges import Range, positive


class ActivationPenalty(Penalty):
    """A penalty of α times the mean square of x, with an α per example in partnets.stn (Merity et al. 2017, AR).

    As in that paper, put it behind the dropout of a recurrent layer's output.

    Args:
        strength: the initial α.
        range: range of α, such as hyper.logarithmic(1e-3, 10).

    Attributes:
        strength: hyper.Learned, a single value.

    Shapes:
        x [batch, ...], returned unchanged.

    Raises:
        ValueError: strength is outside the range.
        RuntimeError: see hyper.Penalty.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> penalty = ActivationPenalty(2.0)
        >>> with hyper.penalties() as found:
        ...     x = penalty(torch.ones(3, 4))
        >>> found[0].mean().item()
        2.0
    """

    per_example = True

    def __init__(self, strength: float = 1.0, *, range: Range = positive) -> None:
        super().__init__()
        range.check("strength", strength)
        self.strength = Learned(strength, range)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength(x) * x.square()


class TemporalActivationPenalty(Penalty):
    """A penalty of β times the mean square of h_t+1 - h_t (Merity et al. 2017, TAR).

    Put it behind a recurrent layer.

    Args:
        strength: the initial β.
        time_dim: the time dimension of x: 1 for [batch, length, ...], 0 for [length, batch, ...].
        range: range of β.

    Attributes:
        strength: hyper.Learned, a single value.

    Shapes:
        x [batch, length, ...], returned unchanged; the penalty of a single time step is 0.

    Raises:
        ValueError: strength is outside the range, or x has no dimension time_dim.
        RuntimeError: see hyper.Penalty.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> penalty = TemporalActivationPenalty(2.0)
        >>> with hyper.penalties() as found:
        ...     x = penalty(torch.arange(4.0).view(1, 4, 1))
        >>> found[0].mean().item()
        2.0
    """

    per_example = True

    def __init__(self, strength: float = 1.0, *, time_dim: int = 1, range: Range = positive) -> None:
        super().__init__()
        range.check("strength", strength)
        self.time_dim, self.strength = time_dim, Learned(strength, range)

    def penalty(self, x: Tensor) -> Tensor:
        if not -x.dim() <= self.time_dim < x.dim():
            raise ValueError(f"x is {list(x.shape)}, without the time dimension time_dim={self.time_dim}.")
        steps = x.diff(dim=self.time_dim)
        return self.strength(x) * (steps if steps.numel() else x.new_zeros(())).square()

    def extra_repr(self) -> str:
        return f"time_dim={self.time_dim}"
