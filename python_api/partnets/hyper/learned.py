"""Learned: numbers in user units, learned through an unconstrained parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partnets.hyper.ranges import Range, precise
from partnets.utils.in_thread import InThread

# Above this number, extra_repr shows only how many values there are.
MOST_SHOWN = 8


class Precise(nn.Module):
    """A module that keeps its parameters in single precision if the model is converted to a lower one.

    In lower precision, updates of ψ round to zero.
    """

    def _apply(self, fn, recurse=True):
        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if new.is_floating_point() and new.itemsize < 4 <= tensor.itemsize else new

        return super()._apply(moved, recurse)


class Learned(Precise):
    """One or several numbers in a range, learned through an unconstrained parameter.

    User units are those in which you give and read values, such as degrees: the constructor, assign() and values() use
    them. A call returns the values as a differentiable tensor, multiplied by `unit`, such as radians. Keep it in a
    Hyperparameter.

    Args:
        value: the initial number, or a sequence of n.
        range: hyper.real, positive, probability, interval(low, high) or logarithmic(low, high); of value * unit.
        unit: a call returns value * unit, such as math.pi / 180 for degrees; one for all, or n.
        names: n names for a sequence's elements; by default the attribute's name and the index: weights.0, ...

    Attributes:
        raw: the unconstrained parameter, [] or [n], of torch's default dtype; never below single precision.
        scale_raw: the inverse softplus of the standard deviation by which partnets.stn perturbs raw, or None.

    Shapes:
        A call without arguments returns [] or [n]. A call with a tensor x returns a tensor that broadcasts with x: the
        same, or [batch, 1, ..., 1] or [batch, 1, ..., n] with x's dimensions if partnets.stn perturbs each example.

    Raises:
        ValueError: a value is outside its range or on its border, the lengths differ, or x has another number of
            examples than the perturbation.
        RuntimeError: called without x although each example has its own value.

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
        self.raw = nn.Parameter(range.transform.inv(self._scaled(values)))
        # Replaces `raw` in a perturbed pass: a tensor of raw's shape or [batch, *raw's], the dimension of an input that
        # has the examples, and a set to add this module to when it is read, or None.
        self.perturbed = InThread()
        self.register_parameter("scale_raw", None)

    def forward(self, x: Tensor | None = None) -> Tensor:
        raw = self.unconstrained(x)
        return self.range.transform(raw.to(x.dtype) if x is not None and x.is_floating_point() else raw)

    def unconstrained(self, x: Tensor | None = None) -> Tensor:
        """Return raw, or in a perturbed pass the perturbed values; a call maps these into the range."""
        perturbed = self.perturbed.get()
        if perturbed is None:
            return self.raw
        raw, batch_dim, noted = perturbed
        if noted is not None:
            noted.add(self)
        if raw.dim() == self.raw.dim():
            return raw
        if x is None:
            raise RuntimeError(
                "this hyper.Learned has one value per example, but was called without x; call it as self.rate(x) with"
                " the tensor x that has the examples, or set per_example = False on its Hyperparameter's class, for one"
                " value per batch."
            )
        check_examples(x, batch_dim, len(raw), None if self.scalar else -1)
        shape = [1] * x.dim()
        shape[batch_dim] = len(raw)
        if not self.scalar:
            shape[-1] = len(self.units)
        return raw.view(shape)

    def values(self, name: str) -> dict[str, float]:
        """Return the current values in user units: a single one under this name, several under their own names."""
        values = self.range.transform(self.raw.detach()).reshape(-1).tolist()
        return {key: value / unit for key, value, unit in zip(self._names(name), values, self.units, strict=True)}

    @torch.no_grad()
    def assign(self, value: float | Sequence[float]) -> None:
        """Replace the current value, or all n values, in user units as in the constructor.

        Raises:
            ValueError: a value is outside its range or on its border, or there are not n; nothing is changed then.

        Example:
            >>> import math
            >>> from partnets import hyper
            >>> angle = Learned(90.0, hyper.interval(0.0, math.pi), unit=math.pi / 180)
            >>> angle.assign(45.0)
            >>> angle()
            tensor(0.7854, grad_fn=<AddBackward0>)
        """
        given = list(value) if isinstance(value, Sequence) else [value]
        scaled = self._scaled(given, dtype=self.raw.dtype, device=self.raw.device)
        self.raw.copy_(self.range.transform.inv(scaled))

    def check(self, values: Sequence[float]) -> None:
        """Raise ValueError unless these are as many numbers as this module has, all inside the range."""
        if len(values) != len(self.units):
            raise ValueError(f"value has {len(values)} numbers; pass {len(self.units)}.")
        for arguments in zip(self._names("value"), values, self.units, strict=True):
            self.range.check(*arguments)

    def _scaled(self, values: list[float], **options: Any) -> Tensor:
        """Return values * units as a tensor of raw's shape, after a check that all are inside the range."""
        self.check(values)
        scaled = [number * scale for number, scale in zip(values, self.units, strict=True)]
        return torch.tensor(scaled[0] if self.scalar else scaled, **{"dtype": precise(), **options})

    def scales(self, name: str) -> dict[str, float]:
        """Return the standard deviation of each value's perturbation, unconstrained, under the names of values().

        The dict is empty if nothing perturbs it.
        """
        if self.scale_raw is None:
            return {}
        scales = nn.functional.softplus(self.scale_raw.detach()).reshape(-1).tolist()
        return {f"{key}, scale": scale for key, scale in zip(self._names(name), scales, strict=True)}

    def extra_repr(self) -> str:
        if len(self.units) > MOST_SHOWN:
            return f"{len(self.units)} values"
        return ", ".join(f"{name}={value:.3g}" for name, value in self.values("value").items())

    def _names(self, name: str) -> list[str]:
        if self.scalar:
            return [name]
        return self.names or [f"{name}.{i}" for i, _ in enumerate(self.units)]


def check_real(module: nn.Module, x: Tensor) -> None:
    """Raise TypeError if x has an integer dtype, to which the module's results would be rounded."""
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"{type(module).__name__} got {x.dtype}, and would round its results to whole numbers; pass x.float()."
        )


def check_examples(
    x: Tensor, batch_dim: int, examples: int, features: int | None = None, of: nn.Module | None = None
) -> None:
    """Raise ValueError unless dimension batch_dim of x has this many examples and precedes that of the features."""
    places = x.dim() if features is None else features % x.dim() if x.dim() else 0
    if not 0 <= batch_dim < places or x.shape[batch_dim] != examples:
        what = "x" if of is None else f"the input of {of}"
        raise ValueError(
            f"{what} is {list(x.shape)}, but each of {examples} examples has its own hyperparameters, in dimension"
            f" {batch_dim}; pass stn.convert batch_dim= (the dimension of the examples throughout the model),"
            " per_example=False (one perturbation per batch), or skip= (modules independent of the examples)."
        )
