"""HyperLayerNorm, HyperRMSNorm, HyperGroupNorm and HyperBatchNorm1d, 2d, 3d: torch's norms as best responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.response import rows_of
from partnets.stn.vector import is_each
from partnets.utils.traced import is_traced

# Prefixes and suffixes that name a parameter, its response, and V or C.
PARTS = ("", ""), ("hyper_", ""), ("", "_scale")


class _Recomputed(torch.autograd.Function):
    """function(*tensors), saving only the tensors: the backward pass recomputes it by `again`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], again: Callable[..., Tensor], *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        y = function(*tensors)
        ctx.again, ctx.dtype = again, y.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        is_second = torch.is_grad_enabled()
        if not is_second:
            given = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needs, strict=True)]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            y = ctx.again(given[0].to(ctx.dtype), *given[1:])
        wanted = [t for t, needed in zip(given, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=is_second))
        return None, None, *(next(found) if needed else None for needed in needs)


class _HyperNorm(HyperLayer):
    """The base of all norms, with a weight and a bias for each example; W_hyper and b_hyper start at 1.

    V and C have a row for each entry of a parameter, or for its first dimension.
    """

    drops = None

    def forward(self, input: Tensor) -> Tensor:
        hyper = self.hyper_of(input, self.features(input))
        if not is_each(hyper):
            return self.normalised(input, self.merged("weight", hyper), self.merged("bias", hyper))
        names = [prefix + name + suffix for name in self.names() for prefix, suffix in PARTS]
        tensors = input, hyper, *map(self.value, names)
        if is_traced():
            return self._scaled(self.normalised, *tensors)
        return _Recomputed.apply(
            partial(self._scaled, self.normalised), partial(self._scaled, self.normaliser()), *tensors
        )

    def features(self, x: Tensor) -> int:
        """Return the first dimension of x that the weight has."""
        return 1

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Apply torch's layer with this weight and bias."""
        raise NotImplementedError

    def normaliser(self) -> Callable[..., Tensor]:
        """Return a function that repeats `normalised` without its side effects."""
        return self.normalised

    def _scaled(self, normalise: Callable[..., Tensor], x: Tensor, hyper: Tensor, *tensors: Tensor) -> Tensor:
        """Normalise x with each example's parameters; `tensors` are p, p_hyper and p_scale for each parameter."""
        y = normalise(x, None, None)
        shape, first = [1] * x.dim(), self.features(x) % x.dim()
        shape[self.vector.batch_dim] = len(hyper)
        for name, parameter, response, scale in zip(self.names(), *(tensors[i::3] for i in range(3)), strict=True):
            with torch.autocast(x.device.type, enabled=False):
                rows = rows_of(hyper.to(scale.dtype), scale)
            own = torch.addcmul(parameter, rows.view(*rows.shape, *[1] * (parameter.dim() - 1)), response).to(y.dtype)
            shape[first : first + parameter.dim()] = parameter.shape
            y = y * own.view(shape) if name == "weight" else y + own.view(shape)
        return y


class HyperLayerNorm(_HyperNorm, nn.LayerNorm):
    """A best response in place of torch.nn.LayerNorm."""

    def features(self, x: Tensor) -> int:
        return -len(self.normalized_shape)

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class HyperRMSNorm(_HyperNorm, nn.RMSNorm):
    """A best response in place of torch.nn.RMSNorm."""

    responding = ("weight",)

    def features(self, x: Tensor) -> int:
        return -len(self.normalized_shape)

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class HyperGroupNorm(_HyperNorm, nn.GroupNorm):
    """A best response in place of torch.nn.GroupNorm."""

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class _HyperBatchNorm(_HyperNorm):
    def normaliser(self) -> Callable[..., Tensor]:
        kept = None, None
        if not self.training and self.running_mean is not None:
            kept = self.running_mean.clone(), self.running_var.clone()
        return lambda x, weight, bias: F.batch_norm(x, *kept, weight, bias, kept[0] is None, 0.0, self.eps)

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        self._check_input_dim(x)
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        is_kept = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if is_kept else (None, None)
        by_batch = self.training or mean is None
        return F.batch_norm(x, mean, variance, weight, bias, by_batch, momentum or 0.0, self.eps)


class HyperBatchNorm1d(_HyperBatchNorm, nn.BatchNorm1d):
    """A best response in place of torch.nn.BatchNorm1d."""


class HyperBatchNorm2d(_HyperBatchNorm, nn.BatchNorm2d):
    """A best response in place of torch.nn.BatchNorm2d."""


class HyperBatchNorm3d(_HyperBatchNorm, nn.BatchNorm3d):
    """A best response in place of torch.nn.BatchNorm3d."""
