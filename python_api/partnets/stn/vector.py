"""HyperVector: λ, the unconstrained hyperparameters of a model as one vector, which all of its layers read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper import Hyperparameter, Learned
from partnets.utils.in_thread import InThread, holding
from partnets.utils.linearised import is_linear, perturbation


class HyperVector:
    """λ: the parameters `raw` of all hyper.Learned in some Hyperparameters, after one another.

    Layers of partnets.stn are functions of it. Outside of `at` it is what the hyperparameters are at present; inside it
    is what was given, for each example or for all, and so are the values of the hyperparameters.

    Args:
        hyper: a module of partnets.hyper, or several.
        centred: layers read how far λ is from its present value, and not λ itself (Bae and Grosse 2020).
        linearised: the response learns where the network's outputs are linear in it.
        scale: σ at the start, the standard deviation of the perturbation of each entry.
        learn_scale: whether σ learns.
        per_example: whether each example has its own perturbation, or a batch has one.
        batch_dim: the dimension of inputs of layers and hyperparameters in which the examples are.

    Attributes:
        modules: the Hyperparameters.
        learned: the hyper.Learned inside, each once.
        size: n, the length of λ.
        names: of `learned`; stn.convert gives the dotted paths in the model.

    Raises:
        ValueError: there is no hyper.Learned inside, or scale is not positive.
        TypeError: one is no Hyperparameter.

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
            raise ValueError("linearised=True is about centred hyperparameters; pass centred=True too.")
        modules = [hyper] if isinstance(hyper, nn.Module) else list(dict.fromkeys(hyper))
        for module in modules:
            if not isinstance(module, Hyperparameter):
                raise TypeError(
                    f"hyper has a {type(module).__name__}; derive it from partnets.hyper.Hyperparameter, with its"
                    " numbers in hyper.Learned."
                )
        # Whether each example can have a value of its own: as the innermost Hyperparameter around it says.
        owned: dict[Learned, bool] = {}
        for module in modules:
            for inner in module.modules():
                if isinstance(inner, Hyperparameter):
                    owned |= {one: inner.per_example for one in inner.modules() if isinstance(one, Learned)}
        if not owned:
            raise ValueError(
                "hyper has no numbers to tune; keep those of a Hyperparameter in hyper.Learned, and pass at least one."
            )
        own = {parameter for one in owned for parameter in one.parameters()}
        if strange := sorted({type(m).__name__ for m in modules if set(m.parameters()) - own}):
            raise ValueError(
                f"{', '.join(strange)} has parameters outside of hyper.Learned, as whole networks have them: a best"
                " response is a function of a few numbers; leave it out of hyper."
            )
        self.modules, self.learned, self.batch_dim = modules, list(owned), batch_dim
        self.names = [f"{type(one).__name__} of {one.raw.numel()}" for one in self.learned]
        self.centred, self.linearised = centred, linearised
        self._per_example = [per_example and own for own in owned.values()]
        self.size = sum(one.raw.numel() for one in self.learned)
        self._input, self._response_learns, self._noted = InThread(), InThread(), InThread()
        for one in self.learned:
            one.scale_raw = nn.Parameter(_softplus_inverse(torch.full_like(one.raw, scale)), requires_grad=learn_scale)

    def description(self) -> str:
        """What a response is a function of: without it V means nothing."""
        return f"{'centred' if self.centred else 'uncentred'} hyperparameters: {', '.join(self.names)}"

    def present(self) -> Tensor:
        """λ as the hyperparameters are at present, [n], differentiable."""
        return torch.cat([one.raw.reshape(-1) for one in self.learned])

    def scale(self) -> Tensor:
        """σ, [n], differentiable."""
        return F.softplus(torch.cat([one.scale_raw.reshape(-1) for one in self.learned]))

    def entropy(self) -> Tensor:
        """H[p(ε | σ)] in nats, the sum of log(σ sqrt(2 π e))."""
        return (self.scale().log() + 0.5 * math.log(2 * math.pi * math.e)).sum()

    def own(self) -> Tensor:
        """Of which entries of λ each example has its own value, [n]."""
        sizes = torch.tensor([one.raw.numel() for one in self.learned])
        return torch.tensor(self._per_example).repeat_interleave(sizes)

    @contextmanager
    def perturbed(self, examples: int, *, learns: bool = False) -> Iterator[None]:
        """Inside, λ is λ + ε with ε ~ N(0, σ²), for each of so many examples its own, by torch's global generator.

        Hyperparameters that are not per_example have one draw for all of them, and so have all without per_example.

        Args:
            examples: of the batches that are computed inside.
            learns: whether λ and σ get gradients, as in a step of the hyperparameters.
        """
        present, scale = self.present(), self.scale()
        if not learns:
            present, scale = present.detach(), scale.detach()
        if not any(self._per_example):
            noise = torch.randn_like(scale)
        else:
            noise = torch.randn(examples, self.size, dtype=scale.dtype, device=scale.device)
            noise = torch.where(self.own().to(scale.device), noise, noise[:1])
        with self.at(present + scale * noise):
            yield

    @contextmanager
    def at(self, value: Tensor) -> Iterator[None]:
        """Inside, in this thread and in the backward passes that it starts, λ is this value.

        Args:
            value: [n], or [batch, n] for a value of each example.

        Raises:
            ValueError: it is neither.
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
        """Inside, in this thread, it gathers which of `learned` are read in passes at some λ, and `note`s of layers."""
        noted: set[nn.Module] = set()
        with holding({self._noted: noted}):
            yield noted

    def note(self, layer: nn.Module) -> None:
        """For whoever is `noting`."""
        if (noted := self._noted.get()) is not None:
            noted.add(layer)

    @contextmanager
    def at_present(self) -> Iterator[None]:
        """Inside, in this thread, λ is what it is at present, and none of it gets a gradient."""
        with self.at(self.present().detach()):
            yield

    @contextmanager
    def unperturbed(self) -> Iterator[None]:
        """Inside, in this thread, parameters of layers can be looked at, whatever λ is outside."""
        with holding({self._input: None}):
            yield

    @contextmanager
    def response_learning(self) -> Iterator[None]:
        """Inside, in this thread, W_elem and b_elem are constants of the layers, and the response alone learns."""
        with holding({self._response_learns: True}):
            yield

    @property
    def is_perturbed(self) -> bool:
        """Whether this is inside of a pass at another λ than the present one."""
        return self._input.get() is not None and self.input() is not None

    @property
    def response_learns(self) -> bool:
        """Whether this is inside of `response_learning`."""
        return self._response_learns.get() is not None

    def input(self) -> Tensor | None:
        """What the layers read: λ, or its distance from the present value; [n], or [batch, n].

        None where that distance is 0, and gets no gradient: then W and b are the weights.
        """
        value = self._input.get()
        if value is not None:
            is_read = value.dim() == 2 or not self.centred or value.requires_grad or value.any() or is_linear(value)
            return value if is_read else None
        present = self.present()
        if not self.centred:
            return present
        return present - present.detach() if present.requires_grad and torch.is_grad_enabled() else None


def _softplus_inverse(x: Tensor) -> Tensor:
    return x + (-(-x).expm1()).log()


def is_each(hyper: Tensor | None) -> bool:
    """Whether an input of layers is one for each example, [batch, n]."""
    return hyper is not None and hyper.dim() == 2
