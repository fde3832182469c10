"""conv1d and conv2d: convolutions with a subnetwork's weight, computed from the packed map."""

from __future__ import annotations

from torch import Tensor

from partkernels.operators.convolution import convolve
from partkernels.partition import Partition


def conv2d(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    narrow: bool = False,
) -> Tensor:
    """Compute F.conv2d(x, w_s^(active), bias, ...) without materialising the subnetwork's weight.

    Gradients and tensors saved for backward are as in `linear`.

    Args:
        x: [batch, in_channels, height, width] or [in_channels, height, width], the weight's dtype; any strides.
        weight: [out_channels, in_channels / groups, kernel_height, kernel_width], floating point; any strides.
        partition: the weight's partition.
        active: k, 1..C: partitions 1..k are active, the others take their defaults.
        update: the partition that receives a gradient, 1..active, or None.
        bias: [out_channels], or [C, out_channels] as in `linear`, or None.
        stride, dilation: an int or a pair of ints, at least 1.
        padding: an int or a pair of ints, at least 0, 'valid' or 'same'.
        groups: divides both numbers of channels.
        narrow: as in `linear`.

    Returns:
        [batch, out_channels, out_height, out_width], without batch if x has no batch; channels_last if x is.

    Raises:
        ValueError: active or update is out of range, or the partition or another argument does not fit the weight.
        TypeError: the weight is not floating point, or stored defaults have another dtype.
        InputError: x or bias does not fit the weight in shape, dtype or device. It is a ValueError and, like the errors
            of torch's operators, a RuntimeError.

    Example:
        >>> import torch
        >>> p = Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
        >>> conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), p, active=1, padding="same").shape
        torch.Size([1, 4, 8, 8])
    """
    return convolve(2, x, weight, partition, active, update, bias, stride, padding, dilation, groups, narrow)


def conv1d(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] | str = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
    narrow: bool = False,
) -> Tensor:
    """Compute F.conv1d(x, w_s^(active), bias, ...) without materialising the subnetwork's weight.

    Gradients, arguments and errors are as in `conv2d`, in one dimension.

    Args:
        x: [batch, in_channels, length] or [in_channels, length], the weight's dtype; any strides.
        weight: [out_channels, in_channels / groups, kernel_length], floating point; any strides.

    Returns:
        [batch, out_channels, out_length], without batch if x has no batch.

    Example:
        >>> import torch
        >>> p = Partition.random((4, 3, 5), (0.5, 0.5), seed=0)
        >>> conv1d(torch.ones(1, 3, 8), torch.ones(4, 3, 5), p, active=1, padding="same").shape
        torch.Size([1, 4, 8])
    """
    return convolve(1, x, weight, partition, active, update, bias, stride, padding, dilation, groups, narrow)
