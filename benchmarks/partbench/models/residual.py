"""Shared parts of FixupResNet and WideResNet: the count of layers, and identity shortcuts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def blocks_per_stage(depth: int) -> int:
    """Return n for a network of 6n + 2 layers: a convolution, three stages of n blocks of two, and a linear layer.

    Raises:
        ValueError: depth is not of the form 6n + 2.

    Example:
        >>> blocks_per_stage(20)
        3
    """
    n, remainder = divmod(depth - 2, 6)
    if n < 1 or remainder:
        raise ValueError(f"depth={depth}; pass 6n + 2, for n blocks of two layers in each of three stages: 8, 14, ...")
    return n


def shortcut(x: Tensor, channels: int, stride: int) -> Tensor:
    """Return x without learned parameters in another shape: every stride-th pixel, padded with channels of zeros.

    Args:
        x: [batch, in_channels, height, width].
        channels: at least in_channels.
        stride: stride of the parallel 3x3 convolution with padding 1.

    Returns:
        [batch, channels, ceil(height / stride), ceil(width / stride)].

    Example:
        >>> import torch
        >>> shortcut(torch.arange(9.0).view(1, 1, 3, 3), channels=2, stride=2)
        tensor([[[[0., 2.],
                  [6., 8.]],
        <BLANKLINE>
                 [[0., 0.],
                  [0., 0.]]]])
    """
    # The paper states "2D average pooling" here (Appendix I.3). The implementations that it follows, of Zhang et al.
    # (2019) and Immer et al. (2022), pool over windows of one pixel, which selects every stride-th pixel.
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, channels - x.shape[1]))
