"""HyperLayerNorm, HyperRMSNorm, HyperGroupNorm and HyperBatchNorm1d, 2d, 3d: torch's norms as best responses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.vector import is_each


class _HyperNorm(HyperLayer):
    """What all norms have in common: each example has a scale and a shift of its own.

    Args:
        *args, **kwargs: as torch's layer takes them.
        hyper: the stn.HyperVector λ that it reads.

    Attributes:
        weight, hyper_weight, bias, hyper_bias: as torch's weight and bias; W_hyper and b_hyper start at 1.
        weight_scale, bias_scale: V and C, a row for each entry, or for the first dimension of normalized_shape.

    Raises:
        ValueError: where each example has its own λ, x has other examples.
    """

    def forward(self, input: Tensor) -> Tensor:
        features = self.features(input)
        input, hyper = self.given(input, features)
        if not is_each(hyper):
            return self.normalised(input, self.merged("weight", hyper), self.merged("bias", hyper))
        y = self.normalised(input, None, None)
        weight, bias = (self._own(name, hyper, y, features) for name in ("weight", "bias"))
        y = y if weight is None else y * weight.to(y.dtype)
        return y if bias is None else y + bias.to(y.dtype)

    def features(self, x: Tensor) -> int:
        """The first of the dimensions of x that the weight has."""
        return 1

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's layer with these."""
        raise NotImplementedError

    def _own(self, name: str, hyper: Tensor, x: Tensor, features: int) -> Tensor | None:
        """The parameter of each example, to broadcast with x."""
        parameter = self.value(name)
        if parameter is None:
            return None
        scale = self.scale(name, hyper)
        own = parameter + scale.view(*scale.shape, *[1] * (parameter.dim() - 1)) * self.value(f"hyper_{name}")
        shape, first = [1] * x.dim(), features % x.dim()
        shape[self.vector.batch_dim] = len(hyper)
        shape[first : first + parameter.dim()] = parameter.shape
        return own.view(shape)


class HyperLayerNorm(_HyperNorm, nn.LayerNorm):
    __doc__ = "torch.nn.LayerNorm as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.LayerNorm

    def features(self, x):
        return -len(self.normalized_shape)

    def normalised(self, x, weight, bias):
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class HyperRMSNorm(_HyperNorm, nn.RMSNorm):
    __doc__ = "torch.nn.RMSNorm as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.RMSNorm
    responding = ("weight",)

    def features(self, x):
        return -len(self.normalized_shape)

    def normalised(self, x, weight, bias):
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class HyperGroupNorm(_HyperNorm, nn.GroupNorm):
    __doc__ = "torch.nn.GroupNorm as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.GroupNorm

    def normalised(self, x, weight, bias):
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class _HyperBatchNorm(_HyperNorm):
    def normalised(self, x, weight, bias):
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
    __doc__ = "torch.nn.BatchNorm1d as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.BatchNorm1d


class HyperBatchNorm2d(_HyperBatchNorm, nn.BatchNorm2d):
    __doc__ = "torch.nn.BatchNorm2d as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.BatchNorm2d


class HyperBatchNorm3d(_HyperBatchNorm, nn.BatchNorm3d):
    __doc__ = "torch.nn.BatchNorm3d as a best response.\n" + _HyperNorm.__doc__.partition("\n")[2]

    ordinary = nn.BatchNorm3d
