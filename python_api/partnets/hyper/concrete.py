"""ConcreteDropout and InputMask: random masks by the concrete relaxation of the Bernoulli distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partnets.hyper import ranges
from partnets.hyper.dropout import check_rate
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.tracing import traced
from partnets.utils.checks import check_at_least
from partnets.utils.traced import is_traced


def concrete(logits: Tensor, shape: Sequence[int], temperature: float) -> Tensor:
    """Draw z = sigmoid((logits + logit(u)) / temperature), u ~ U(0, 1): nearly 0 or 1, and differentiable in logits.

    See Maddison et al. (2016); P(z > 1/2) = p for logits logit(p). torch.distributions.RelaxedBernoulli takes p instead
    of its logit, which is twice as slow. It also clamps p to [eps, 1 - eps], so that in bfloat16 the gradient is 0 for
    logits beyond ±5.5.
    """
    # 1.2e-7 in float32. The code of Gal et al. (2017) uses 1e-7, which rounds to 0 in lower precisions.
    eps = torch.finfo(logits.dtype).eps
    noise = torch.rand(shape, dtype=logits.dtype, device=logits.device).logit(eps=eps)
    return ((logits + noise) / temperature).sigmoid()


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; pass a positive number.")


class ConcreteDropout(Hyperparameter):
    """Dropout with a learned rate p, by the concrete relaxation (Gal et al. 2017, Maddison et al. 2016; Appendix J).

    In training, x is multiplied by z / (1 - p), with an elementwise mask z that is close to 0 with probability p. The
    gradient reaches p through the mask. In evaluation mode, x is returned unchanged.

    Args:
        rate: the initial p.
        temperature: temperature of the relaxation; the closer it is to 0, the closer the mask is to {0, 1}.
        range: range of the rate, inside [0, 1]; hyper.interval(0, 0.9) limits it to 0.9, as in self-tuning networks
            (MacKay et al. 2019).

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

    def __init__(
        self, rate: float = 0.1, *, temperature: float = 0.1, range: ranges.Range = ranges.probability
    ) -> None:
        super().__init__()
        check_rate("rate", rate, range)
        _check_temperature(temperature)
        self.temperature = temperature
        self.rate = Learned(rate, range)

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if not self.training:
            return x
        limits = torch.finfo(self.rate.raw.dtype)
        rate = self.rate(x).clamp(limits.tiny, 1 - limits.eps)
        is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()  # random states cannot be read then
        if not rate.requires_grad or is_traced() or is_captured:
            return _dropped(x, rate, self.temperature)
        return _Redrawn.apply(x, rate, self.temperature)

    def to_torch(self) -> nn.Dropout:
        """Return torch's dropout with the learned rate."""
        return nn.Dropout(self.values()["rate"])

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def _dropped(x: Tensor, rate: Tensor, temperature: float) -> Tensor:
    kept = concrete(-rate.logit(), x.shape, temperature)
    return x * (kept / (1 - rate)).to(x.dtype)


class _Redrawn(torch.autograd.Function):
    """_dropped with its mask redrawn in backward instead of stored, which saves three tensors of x's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(x, rate)
        ctx.temperature, ctx.state = temperature, _random_state(x.device)
        return _dropped(x, rate, temperature)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed, device = [i for i in range(2) if ctx.needs_input_grad[i]], gradient.device
        saved = ctx.saved_tensors  # once, as activation checkpoints require
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type), torch.enable_grad():
            if device.type == "cpu":
                torch.set_rng_state(ctx.state)
            else:
                torch.get_device_module(device).set_rng_state(ctx.state, device)
            y = _dropped(*saved, ctx.temperature)
        found = torch.autograd.grad(y, [saved[i] for i in needed], gradient, create_graph=torch.is_grad_enabled())
        return *(found[needed.index(i)] if i in needed else None for i in range(2)), None


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


class InputMask(Hyperparameter):
    """A random mask of the input, with one probability for each feature (Section 5, mask learning).

    In training, each example draws a separate mask from the concrete relaxation of the Bernoulli distribution
    (Maddison et al. 2016), z = sigmoid((logit(p) + logit(u)) / temperature) with u ~ U(0, 1). The gradient reaches p
    through the mask. In evaluation mode the mask is its mean, p, as in dropout; predictions and L_ML are deterministic.
    values() returns the probability of each feature, under its index.

    Args:
        features: the number of features, the last dimension of x.
        probability: the initial p of each feature, in (0, 1).
        temperature: temperature of the relaxation; the closer it is to 0, the closer the mask is to {0, 1}.

    Attributes:
        probability: hyper.Learned, [features].
        logits: its unconstrained parameter, logit(p), [features].

    Shapes:
        x [..., features], floating point; returns the same shape.

    Raises:
        ValueError: features is below 1, probability is not in (0, 1), temperature is not positive, or x has another
            number of features.

    Example:
        >>> mask = InputMask(3, probability=0.75).eval()
        >>> mask(torch.ones(1, 3))
        tensor([[0.7500, 0.7500, 0.7500]], grad_fn=<MulBackward0>)
    """

    per_example = True

    def __init__(self, features: int, *, probability: float = 0.5, temperature: float = 0.1) -> None:
        super().__init__()
        check_at_least(1, features=features)
        ranges.probability.check("probability", probability)
        _check_temperature(temperature)
        self.temperature = temperature
        names = [str(i) for i in range(features)]
        self.probability = Learned([probability] * features, ranges.probability, names=names)

    @property
    def logits(self) -> nn.Parameter:
        return self.probability.raw

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if x.shape[-1:] != self.logits.shape:
            raise ValueError(f"x is {list(x.shape)}; pass [..., {len(self.logits)}], an entry for each feature.")
        if not self.training:
            return x * self.probability(x).to(x.dtype)
        return x * concrete(self.probability.unconstrained(x), x.shape, self.temperature).to(x.dtype)

    def to_torch(self) -> nn.Module:
        """Return a module that multiplies by the mean mask, in training mode too."""
        return traced(MeanMask(self.probability().detach()))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class MeanMask(nn.Module):
    """InputMask's evaluation mode, for torch.fx."""

    def __init__(self, probability: Tensor) -> None:
        super().__init__()
        self.register_buffer("probability", probability)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.probability.expand_as(x).type_as(x)  # expand_as raises for another number of features
