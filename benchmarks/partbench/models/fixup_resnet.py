"""FixupResNet: a residual network without normalisation."""

from __future__ import annotations

import functools
import math

import torch.nn.functional as F
from torch import Tensor, nn

from partbench.models.residual import blocks_per_stage, shortcut
from partkernels import Normal, Zeros
from partnets.nn import Bias, Scale


class FixupResNet(nn.Module):
    """The FixUp ResNet of the CIFAR and TinyImagenet experiments (Appendix I.3; Zhang et al. 2019); returns logits.

    It consists of a convolution, three stages of residual blocks with 16, 32 and 64 channels, average pooling and a
    linear layer. Each stage but the first halves the image. In each block, the first convolution is initialised from
    N(0, sqrt(2 / (9 channels)) / sqrt(number of blocks)). The second is initialised to 0, as is the linear layer, so
    logits are initially 0. `partnets.partition` keeps these weights; with defaults='seed' it draws from the same
    distributions.

    Zhang et al. (2019) train the scalars of Bias and Scale with a tenth of the learning rate: see groups in
    partnets.optim.SGD.

    Args:
        depth: 6n + 2 for n blocks per stage: 8, 14, 20, ...; 74 827, 171 610 and 268 393 parameters by default.
        width: multiplier of the channels.
        in_channels: channels of the images.
        classes: number of logits.

    Attributes:
        stem, stage1, stage2, stage3: the feature layers, with 16, 16, 32 and 64 times width channels.

    Shapes:
        x [batch, in_channels, height, width], of any height and width; returns [batch, classes].

    Raises:
        ValueError: depth is not of the form 6n + 2.

    Example:
        >>> import torch
        >>> FixupResNet(depth=8)(torch.rand(2, 3, 32, 32)).abs().max().item()
        0.0
    """

    def __init__(self, depth: int = 8, width: int = 1, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        n = blocks_per_stage(depth)
        self.stem = nn.Conv2d(in_channels, 16 * width, 3, padding=1, bias=False)
        self.bias1 = Bias()
        self.stage1 = _stage(n, 16 * width, 16 * width, stride=1)
        self.stage2 = _stage(n, 16 * width, 32 * width, stride=2)
        self.stage3 = _stage(n, 32 * width, 64 * width, stride=2)
        self.bias2 = Bias()
        self.classifier = nn.Linear(64 * width, classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)
        self.classifier.seed_defaults = Zeros()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bias1(self.stem(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.classifier(self.bias2(x.mean((2, 3))))


class _FixupBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int, blocks: int) -> None:
        super().__init__()
        self.stride = stride
        self.bias1a = Bias()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bias1b = Bias()
        self.bias2a = Bias()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.scale = Scale()
        self.bias2b = Bias()
        std = math.sqrt(2 / (9 * channels) / blocks)
        nn.init.normal_(self.conv1.weight, std=std)
        nn.init.zeros_(self.conv2.weight)
        self.conv1.seed_defaults, self.conv2.seed_defaults = functools.partial(Normal, std), Zeros()

    def forward(self, x: Tensor) -> Tensor:
        biased = self.bias1a(x)
        branch = F.relu(self.bias1b(self.conv1(biased)))
        branch = self.bias2b(self.scale(self.conv2(self.bias2a(branch))))
        identity = x if self.stride == 1 else shortcut(biased, branch.shape[1], self.stride)
        return F.relu(branch + identity)


def _stage(n: int, in_channels: int, channels: int, stride: int) -> nn.Sequential:
    first = _FixupBlock(in_channels, channels, stride, blocks=3 * n)
    return nn.Sequential(first, *(_FixupBlock(channels, channels, 1, blocks=3 * n) for _ in range(n - 1)))
