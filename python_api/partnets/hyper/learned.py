"""Learned: numbers that are learned, in the user's units outside and unconstrained inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partnets.hyper.ranges import Range

# More are not shown one by one.
MOST_SHOWN = 8


class Learned(nn.Module):
    """One or several numbers in a range, learned through an unconstrained parameter.

    Constructed from values in the user's units; a call gives them as a tensor, differentiable, in the units in which
    one computes; values() gives them back in the user's. Keep it in a Hyperparameter.

    Args:
        value: the initial number, or a sequence of n.
        range: hyper.real, positive, probability, interval(low, high) or clamped(low, high); of what the call gives.
        unit: the call gives value * unit, such as math.pi / 180 for degrees; one for all, or n.
        names: of a sequence's elements, n; by default the attribute's name and the indices, weights.0, weights.1, ...

    Attributes:
        raw: the unconstrained parameter, [] or [n], of torch's default dtype.

    Shapes:
        A call takes nothing and gives [] or [n].

    Raises:
        ValueError: a value is outside its range or on its border, or the lengths differ.

    Example:
        >>> import math
        >>> from partnets import hyper
        >>> angle = Learned(90.0, hyper.interval(0.0, math.pi), unit=math.pi / 180)
        >>> angle()
        tensor(1.5708, grad_fn=<AddBackward0>)
        >>> round(angle.values("angle")["angle"], 3)
        90.0
        >>> Learned([0.25, 0.5], hyper.probability).values("rates")
        {'rates.0': 0.25, 'rates.1': 0.5}
    """

    def __init__(
        self,
        value: float | Sequence[float],
        range: Range,
        *,
        unit: float | Sequence[float] = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.range = range
        self.scalar = not isinstance(value, Sequence)
        values = [value] if self.scalar else list(value)
        self.units = list(unit) if isinstance(unit, Sequence) else [unit] * len(values)
        self.names = None if names is None else list(names)
        if len(self.units) != len(values) or (names is not None and (self.scalar or len(self.names) != len(values))):
            raise ValueError(f"value={value}, unit={unit} and names={names}; pass as many units and names as values.")
        for arguments in zip(self._names("value"), values, self.units, strict=True):
            range.check(*arguments)
        scaled = [number * scale for number, scale in zip(values, self.units, strict=True)]
        initial = torch.tensor(scaled[0] if self.scalar else scaled, dtype=torch.get_default_dtype())
        self.raw = nn.Parameter(range.transform.inv(initial))

    def forward(self) -> Tensor:
        return self.range.transform(self.raw)

    def values(self, name: str) -> dict[str, float]:
        """The present values in the user's units: a single one under this name, others under names of their own."""
        values = self().detach().reshape(-1).tolist()
        return {key: value / unit for key, value, unit in zip(self._names(name), values, self.units, strict=True)}

    def extra_repr(self) -> str:
        if len(self.units) > MOST_SHOWN:
            return f"{len(self.units)} values"
        return ", ".join(f"{name}={value:.3g}" for name, value in self.values("value").items())

    def _names(self, name: str) -> list[str]:
        if self.scalar:
            return [name]
        return self.names or [f"{name}.{i}" for i, _ in enumerate(self.units)]
