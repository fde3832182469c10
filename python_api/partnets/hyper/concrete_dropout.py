"""ConcreteDropout: dropout with a learned rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from partnets.hyper.concrete import check_temperature, concrete
from partnets.hyper.dropout import check_rates
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.ranges import Range, probability
from partnets.utils.traced import is_traced


class ConcreteDropout(Hyperparameter):
    """Dropout with a learned rate p, by the concrete relaxation (Gal et al. 2017, Maddison et al. 2016; Appendix J).

    In training, x is multiplied by z / (1 - p), with an elementwise mask z that is close to 0 with probability p. The
    gradient reaches p through the mask. In evaluation mode, x is returned unchanged.

    Args:
        rate: the initial p.
        temperature: temperature of the relaxation; the closer it is to 0, the closer the mask is to {0, 1}.
        range: range of the rate, inside [0, 1]; hyper.interval(0, 0.9) limits it to 0.9, as in self-tuning networks
            (MacKay et al. 2019).

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        x of any shape, floating point; returns the same shape.

    Raises:
        ValueError: rate is outside the range, the range exceeds [0, 1], or temperature is not positive.

    Example:
        >>> dropout = ConcreteDropout(0.25)
        >>> x = torch.ones(2, 3)
        >>> dropout(x).shape, dropout.values()
        (torch.Size([2, 3]), {'rate': 0.25})
        >>> torch.equal(dropout.eval()(x), x)
        True
    """

    per_example = True
    only_in_training = True

    def __init__(self, rate: float = 0.1, *, temperature: float = 0.1, range: Range = probability) -> None:
        super().__init__()
        check_rates(range)
        range.check("rate", rate)
        check_temperature(temperature)
        self.temperature = temperature
        self.rate = Learned(rate, range)

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if not self.training:
            return x
        limits = torch.finfo(self.rate.raw.dtype)
        rate = self.rate(x).clamp(limits.tiny, 1 - limits.eps)
        if not rate.requires_grad or is_traced() or is_captured(x.device):
            return _dropped(x, rate, self.temperature)
        return _DrawnAgain.apply(x, rate, self.temperature)

    def to_ordinary(self) -> nn.Dropout:
        """Return torch's dropout with the learned rate.

        Example:
            >>> ConcreteDropout(0.25).to_ordinary()
            Dropout(p=0.25, inplace=False)
        """
        return nn.Dropout(self.values()["rate"])

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def _dropped(x: Tensor, rate: Tensor, temperature: float) -> Tensor:
    kept = concrete(-rate.logit(), x.shape, temperature)
    return x * (kept / (1 - rate)).to(x.dtype)


class _DrawnAgain(torch.autograd.Function):
    """_dropped with its mask redrawn in backward instead of stored, which saves three tensors of x's size."""

    @staticmethod
    def forward(ctx, x: Tensor, rate: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(x, rate)
        ctx.temperature, ctx.state = temperature, noise_state(x.device)
        return _dropped(x, rate, temperature)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = [i for i in range(2) if ctx.needs_input_grad[i]]
        with noise_of(ctx.state, gradient.device), torch.enable_grad():
            y = _dropped(*ctx.saved_tensors, ctx.temperature)
        wanted = [ctx.saved_tensors[i] for i in needed]
        found = torch.autograd.grad(y, wanted, gradient, create_graph=torch.is_grad_enabled())
        return *(found[needed.index(i)] if i in needed else None for i in range(2)), None


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, during which random states cannot be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def noise_state(device: torch.device) -> torch.Tensor:
    """Return only the state of torch's generator for a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextmanager
def noise_of(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Set the state of torch's generator for a device in the context, to repeat draws; restore it on exit.

    Example:
        >>> cpu = torch.device("cpu")
        >>> state, first = noise_state(cpu), torch.rand(())
        >>> with noise_of(state, cpu):
        ...     bool(torch.rand(()) == first)
        True
    """

    def put(state: torch.Tensor) -> None:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)

    before = noise_state(device)
    try:
        put(state)
        yield
    finally:
        put(before)
