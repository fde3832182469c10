"""conv_transpose1d and conv_transpose2d: transposed convolutions with a subnetwork's weight."""

from __future__ import annotations

from torch import Tensor

from partkernels.operators.convolution import convolve_transposed
from partkernels.partition import Partition


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
    narrow: bool = False,
) -> Tensor:
    """Compute F.conv_transpose2d(x, w_s^(active), bias, ...) without materialising the subnetwork's weight.

    Gradients and tensors saved for backward are as in `linear`.

    Args:
        x: [batch, in_channels, height, width] or [in_channels, height, width], the weight's dtype; any strides.
        weight: [in_channels, out_channels / groups, kernel_height, kernel_width], floating point; any strides.
        partition: the weight's partition.
        active: k, 1..C: partitions 1..k are active, the others take their defaults.
        update: the partition that receives a gradient, 1..active, or None.
        bias: [out_channels], or [C, out_channels] as in `linear`, or None.
        stride, dilation: an int or a pair of ints, at least 1.
        padding: an int or a pair of ints, at least 0.
        output_padding: an int or a pair of ints, at least 0 and smaller than the stride or the dilation.
        groups: divides both numbers of channels.
        narrow: as in `linear`.

    Returns:
        [batch, out_channels, out_height, out_width], without batch if x has no batch; channels_last if x is.

    Raises:
        ValueError, TypeError, InputError: as in `conv2d`.

    Example:
        >>> import torch
        >>> p = Partition.random((3, 4, 3, 3), (0.5, 0.5), seed=0)
        >>> conv_transpose2d(torch.ones(1, 3, 8, 8), torch.ones(3, 4, 3, 3), p, active=1, stride=2).shape
        torch.Size([1, 4, 17, 17])
    """
    return convolve_transposed(
        2, x, weight, partition, active, update, bias, stride, padding, output_padding, groups, dilation, narrow
    )


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] = 0,
    output_padding: int | tuple[int] = 0,
    groups: int = 1,
    dilation: int | tuple[int] = 1,
    narrow: bool = False,
) -> Tensor:
    """Compute F.conv_transpose1d(x, w_s^(active), bias, ...) without materialising the subnetwork's weight.

    Gradients, arguments and errors are as in `conv_transpose2d`, in one dimension.

    Args:
        x: [batch, in_channels, length] or [in_channels, length], the weight's dtype; any strides.
        weight: [in_channels, out_channels / groups, kernel_length], floating point; any strides.

    Returns:
        [batch, out_channels, out_length], without batch if x has no batch.

    Example:
        >>> import torch
        >>> p = Partition.random((3, 4, 5), (0.5, 0.5), seed=0)
        >>> conv_transpose1d(torch.ones(1, 3, 8), torch.ones(3, 4, 5), p, active=1).shape
        torch.Size([1, 4, 12])
    """
    return convolve_transposed(
        1, x, weight, partition, active, update, bias, stride, padding, output_padding, groups, dilation, narrow
    )
