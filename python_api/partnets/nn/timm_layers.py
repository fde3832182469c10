"""Linear, Conv2dSame and BatchNormAct2d: those of timm, whose models are made of them. Needs timm.

Its other layers read their parameters as attributes, and need no rule.
"""

from __future__ import annotations

from timm.layers import BatchNormAct2d as _BatchNormAct2d
from timm.layers import Conv2dSame as _Conv2dSame
from timm.layers import Linear as _Linear
from timm.layers.padding import pad_same
from torch import Tensor

import partkernels
from partnets.nn.batch_norm import _BatchNorm
from partnets.nn.conv import _Convolution
from partnets.nn.layer import PartitionedLayer


class Linear(PartitionedLayer, _Linear):
    """timm's Linear, partitioned as partnets.Linear is."""

    ordinary = _Linear
    weights = ("weight",)
    shifts = ("bias",)
    unit_dim = -1
    unit_names = ("in_features", "out_features")

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(partkernels.linear, input)


class Conv2dSame(_Convolution, _Conv2dSame):
    """timm's Conv2dSame, partitioned as partnets.Conv2d is: padded for each input as TensorFlow's 'SAME' does."""

    ordinary = _Conv2dSame
    unit_dim = -3

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        return self.compute(
            partkernels.conv2d, x, stride=self.stride, padding=0, dilation=self.dilation, groups=self.groups
        )


class BatchNormAct2d(_BatchNorm, _BatchNormAct2d):
    """timm's BatchNormAct2d: partnets.BatchNorm2d, then its own dropout and activation.

    An activation with parameters of its own stays as it is, and optimisers raise for it: freeze it.
    """

    ordinary = _BatchNormAct2d

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))
