"""HyperVector: λ, the unconstrained hyperparameters of a model as one vector that all of its layers read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper import Hyperparameter, Learned, positive
from partnets.utils.in_thread import InThread, holding
from partnets.utils.linearised import is_linear, perturbation


class HyperVector:
    """λ: the concatenated parameters `raw` of all hyper.Learned in some Hyperparameters.

    Layers of partnets.stn are functions of λ. Outside of `at`, λ is the current value of the hyperparameters. Inside,
    λ and the values of the hyperparameters are those given, for each example or for all.

    Args:
        hyper: one or several modules of partnets.hyper; other arguments as in stn.convert.

    Attributes:
        modules: the Hyperparameters.
        learned: the hyper.Learned inside, without duplicates.
        size: n, the length of λ.
        names: the names of `learned`; stn.convert sets them to dotted paths in the model.

    Raises:
        ValueError: hyper contains no hyper.Learned, or scale is not positive.
        TypeError: hyper contains something other than a Hyperparameter.

    Example:
        >>> from partnets import hyper
        >>> HyperVector([hyper.ConcreteDropout(0.5), hyper.InputMask(3)]).present()
        tensor([0., 0., 0., 0.], grad_fn=<CatBackward0>)
    """

    def __init__(
        self,
        hyper: Hyperparameter | Sequence[Hyperparameter],
        *,
        centred: bool = True,
        linearised: bool = False,
        scale: float = 0.5,
        learn_scale: bool = True,
        per_example: bool = True,
        batch_dim: int = 0,
    ) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale}; pass a positive number, in units of the unconstrained hyperparameters.")
        if linearised and not centred:
            raise ValueError("linearised=True requires centred hyperparameters; pass centred=True too.")
        modules = [hyper] if isinstance(hyper, nn.Module) else list(dict.fromkeys(hyper))
        for module in modules:
            if not isinstance(module, Hyperparameter):
                raise TypeError(
                    f"hyper has a {type(module).__name__}; derive it from partnets.hyper.Hyperparameter, with its"
                    " numbers in hyper.Learned."
                )
        # Whether each example can have its own value, according to the innermost enclosing Hyperparameter.
        owned: dict[Learned, bool] = {}
        for module in modules:
            for inner in module.modules():
                if isinstance(inner, Hyperparameter):
                    owned |= {one: inner.per_example for one in inner.modules() if isinstance(one, Learned)}
        if not owned:
            raise ValueError(
                "hyper has no numbers to tune; keep the numbers of a Hyperparameter in hyper.Learned, at least one."
            )
        own = {parameter for one in owned for parameter in one.parameters()}
        if strange := sorted({type(m).__name__ for m in modules if set(m.parameters()) - own}):
            raise ValueError(
                f"{', '.join(strange)} has parameters outside of hyper.Learned, like a network, but a best response is"
                " a function of a few numbers; leave it out of hyper."
            )
        self.modules, self.learned, self.batch_dim = modules, list(owned), batch_dim
        self.names = [f"{type(one).__name__} of {one.raw.numel()}" for one in self.learned]
        self.centred, self.linearised = centred, linearised
        self._per_example = [per_example and own for own in owned.values()]
        self.size = sum(one.raw.numel() for one in self.learned)
        self._input, self._response_learns, self._noted = InThread(), InThread(), InThread()
        for one in self.learned:
            scales = torch.full_like(one.raw, scale)
            one.scale_raw = nn.Parameter(positive.transform.inv(scales), requires_grad=learn_scale)

    def description(self) -> str:
        """Return a description of λ, which defines the meaning of V's columns."""
        return f"{'centred' if self.centred else 'uncentred'} hyperparameters: {', '.join(self.names)}"

    def present(self) -> Tensor:
        """Return λ at the current values of the hyperparameters, [n], differentiable."""
        return torch.cat([one.raw.reshape(-1) for one in self.learned])

    def scale(self) -> Tensor:
        """Return σ, [n], differentiable."""
        return F.softplus(torch.cat([one.scale_raw.reshape(-1) for one in self.learned]))

    def entropy(self) -> Tensor:
        """Return H[p(ε | σ)] in nats, the sum of log(σ sqrt(2 π e))."""
        return (self.scale().log() + 0.5 * math.log(2 * math.pi * math.e)).sum()

    @contextmanager
    def perturbed(self, examples: int, *, learns: bool = False) -> Iterator[None]:
        """Perturb λ in the context to λ + ε with ε ~ N(0, σ²) for each example, drawn by torch's global generator.

        Hyperparameters that are not per_example share one draw for the batch; without per_example, all do.

        Args:
            examples: the number of examples in batches inside the context.
            learns: whether λ and σ get gradients, as in a step of the hyperparameters.
        """
        present, scale = self.present(), self.scale()
        if not learns:
            present, scale = present.detach(), scale.detach()
        if not any(self._per_example):
            noise = torch.randn_like(scale)
        else:
            noise = torch.randn(examples, self.size, dtype=scale.dtype, device=scale.device)
            sizes = torch.tensor([one.raw.numel() for one in self.learned])
            own = torch.tensor(self._per_example).repeat_interleave(sizes).to(scale.device)
            noise = torch.where(own, noise, noise[:1])
        with self.at(present + scale * noise):
            yield

    @contextmanager
    def at(self, value: Tensor) -> Iterator[None]:
        """Set λ to a value in the context, for this thread and the backward passes that it starts.

        Args:
            value: [n], or [batch, n] with a row for each example.

        Raises:
            ValueError: value has another shape.
        """
        if value.dim() not in (1, 2) or value.shape[-1] != self.size:
            raise ValueError(f"λ is {list(value.shape)}; pass [{self.size}] or [batch, {self.size}].")
        parts = value.split([one.raw.numel() for one in self.learned], -1)
        now = {self._input: perturbation(value - self.present().detach()) if self.centred else value}
        for one, part, per_example in zip(self.learned, parts, self._per_example, strict=True):
            own = part
            if value.dim() == 2 and not per_example:
                own = part[0] if len(part) else one.raw.detach().reshape(-1)
            now[one.perturbed] = own.reshape((*own.shape[:-1], *one.raw.shape)), self.batch_dim, self._noted.get()
        with holding(now):
            yield

    @contextmanager
    def noting(self) -> Iterator[set[nn.Module]]:
        """Collect in the context, for this thread, the members of `learned` that are read inside `at`."""
        noted: set[nn.Module] = set()
        with holding({self._noted: noted}):
            yield noted

    @contextmanager
    def response_learning(self) -> Iterator[None]:
        """Treat W_elem and b_elem as constants in the context, for this thread; only the response learns."""
        with holding({self._response_learns: True}):
            yield

    @property
    def is_perturbed(self) -> bool:
        """Return whether the current pass is at another λ than the present one."""
        return self._input.get() is not None and self.input() is not None

    @property
    def response_learns(self) -> bool:
        """Return whether `response_learning` is active."""
        return self._response_learns.get() is not None

    def input(self) -> Tensor | None:
        """Return the layers' input: λ, or with `centred` its difference from the current value; [n] or [batch, n].

        None if this difference is 0 and gets no gradient: the weights are then W and b.
        """
        value = self._input.get()
        if value is not None:
            is_read = value.dim() == 2 or not self.centred or value.requires_grad or value.any() or is_linear(value)
            return value if is_read else None
        present = self.present()
        if not self.centred:
            return present
        return present - present.detach() if present.requires_grad and torch.is_grad_enabled() else None


def is_each(hyper: Tensor | None) -> bool:
    """Return whether an input of layers has a row for each example, [batch, n]."""
    return hyper is not None and hyper.dim() == 2
