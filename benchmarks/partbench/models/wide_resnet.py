"""WideResNet with pre-activation, and ThinResNet50, a deep and narrow one with GroupNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from partbench.models.residual import blocks_per_stage, shortcut


class WideResNet(nn.Module):
    """Wide ResNet-depth-width (Appendix I.3; Zagoruyko and Komodakis 2016); returns logits.

    It consists of a convolution to 16 channels, three stages of pre-activation blocks (He et al. 2016) with 16, 32 and
    64 times width channels, a norm, ReLU, average pooling, a linear layer. Each stage but the first halves the image.

    Args:
        depth: 6n + 2 for n blocks per stage.
        width: multiplier of the stages' channels.
        in_channels: channels of the images.
        classes: number of logits.
        norm: norm(channels) returns a normalisation layer, by default BatchNorm2d, with 6 645 914 parameters in all.

    Attributes:
        stem, stage1, stage2, stage3: the feature layers, in order.

    Shapes:
        x [batch, in_channels, height, width], of any height and width; returns [batch, classes].

    Raises:
        ValueError: depth is not of the form 6n + 2, or an argument is not positive.

    Example:
        >>> import torch
        >>> model = WideResNet(depth=8, width=2)
        >>> model(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> features = nn.Sequential(model.stem, model.stage1, model.stage2)
        >>> features(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 64, 16, 16])
    """

    def __init__(
        self,
        depth: int = 20,
        width: int = 5,
        in_channels: int = 3,
        classes: int = 10,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        # Zagoruyko and Komodakis count 6n + 4, with convolutions in the shortcuts. The paper has a depth of 20, and 13
        # convolutions up to the second stage: 1 + 6 + 6, so none in the shortcuts.
        n = blocks_per_stage(depth)
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.stage1 = _stage(n, 16, 16 * width, 1, norm)
        self.stage2 = _stage(n, 16 * width, 32 * width, 2, norm)
        self.stage3 = _stage(n, 32 * width, 64 * width, 2, norm)
        self.norm = norm(64 * width)
        self.classifier = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.classifier(F.relu(self.norm(x)).mean((2, 3)))


class ThinResNet50(WideResNet):
    """The paper's ResNet-50 (Appendix I.3): WideResNet of depth 50 and width 1 with 2-group GroupNorm.

    It has three stages of 8 blocks with 16, 32 and 64 channels and 755 802 parameters; it is not ImageNet's ResNet-50.

    Args:
        classes: as in WideResNet.

    Shapes, Raises, Attributes:
        as in WideResNet.

    Example:
        >>> model = ThinResNet50()
        >>> sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
        50
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__(50, 1, classes=classes, norm=lambda channels: nn.GroupNorm(2, channels))


class _PreActivationBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stride = stride
        self.norm1 = norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(F.relu(self.norm1(x)))
        branch = self.conv2(F.relu(self.norm2(branch)))
        return shortcut(x, branch.shape[1], self.stride) + branch


def _stage(n: int, in_channels: int, channels: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    first = _PreActivationBlock(in_channels, channels, stride, norm)
    return nn.Sequential(first, *(_PreActivationBlock(channels, channels, 1, norm) for _ in range(n - 1)))
