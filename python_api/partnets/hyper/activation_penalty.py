"""ActivationPenalty and TemporalActivationPenalty: activations that are large, or that change from step to step."""

from __future__ import annotations

from torch import Tensor

from partnets.hyper.learned import Learned
from partnets.hyper.penalty import Penalty
from partnets.hyper.ranges import Range, positive


class ActivationPenalty(Penalty):
    """Adds α times the mean square of x to the training loss (Merity et al. 2017, AR), for each example its own α.

    Put it behind the dropout of a recurrent layer's output, as there.

    Args:
        strength: the initial α.
        range: of it, such as hyper.logarithmic(1e-3, 10).

    Attributes:
        strength: hyper.Learned, a single value.

    Shapes:
        x [batch, ...] to itself.

    Raises:
        ValueError: strength is not inside the range.
        RuntimeError: as of hyper.Penalty.

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
    """Adds β times the mean square of h_t+1 - h_t to the training loss (Merity et al. 2017, TAR).

    Put it behind a recurrent layer.

    Args:
        strength: the initial β.
        time_dim: the dimension of x in which the steps are: 1 of [batch, length, ...], 0 of [length, batch, ...].
        range: of β.

    Attributes:
        strength: hyper.Learned, a single value.

    Shapes:
        x [batch, length, ...] to itself; of a single step there is no penalty.

    Raises:
        ValueError: strength is not inside the range, or x has no such dimension.
        RuntimeError: as of hyper.Penalty.

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
            raise ValueError(f"x is {list(x.shape)}, without the dimension time_dim={self.time_dim} of its steps.")
        steps = x.diff(dim=self.time_dim)
        return self.strength(x) * (steps if steps.numel() else x.new_zeros(())).square()

    def extra_repr(self) -> str:
        return f"time_dim={self.time_dim}"
