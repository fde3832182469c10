"""conv2d and its gradients: convolutions with a subnetwork's weight, computed from the packed map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.arguments import InputError, convolution_geometry
from partkernels_numpy.arrays import check_like, checked, plain
from partkernels_numpy.bias import live_bias
from partkernels_numpy.checks import check_defaults, check_weight, checked_number
from partkernels_numpy.partition import Partition


def conv2d(
    x: np.ndarray,
    weight: np.ndarray,
    partition: Partition,
    active: int,
    *,
    bias: np.ndarray | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> np.ndarray:
    """Compute the convolution (as in torch, a cross-correlation) of images with w_s^(active), without materialising it.

    Args:
        x: [batch, in_channels, height, width], the weight's dtype; any strides.
        weight: [out_channels, in_channels / groups, kernel_height, kernel_width]; any strides.
        partition: the weight's partition.
        active: k in 1..C. Partitions 1..k are active; the others have their default values.
        bias: [out_channels], or [C, out_channels] as in linear, or None.
        stride, dilation: an int or a pair of ints, at least 1.
        padding: an int or a pair of ints, at least 0, 'valid' or 'same'.
        groups: divides both numbers of channels.

    Returns:
        [batch, out_channels, out_height, out_width].

    Raises:
        ValueError, TypeError: an argument is out of range, or the partition does not fit the weight.
        InputError: x or bias does not fit the weight.

    Example:
        >>> p = Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
        >>> conv2d(np.ones((1, 3, 8, 8)), np.ones((4, 3, 3, 3)), p, active=1, padding="same").shape
        (1, 4, 8, 8)
    """
    weight = check_weight("the weight", weight, partition)
    active = checked_number("active", active, partition)
    check_defaults(weight, partition)
    shift = live_bias(bias, weight, partition, active)
    x = check_like("x", x, "the weight", weight)
    geometry = _Geometry(x.shape, partition, stride, padding, dilation, groups)
    y = np.empty(geometry.output, weight.dtype)
    _library.conv2d(geometry.padded(x), weight, shift, geometry.numbers, groups, partition.native, active, y)
    return y


def conv2d_grad_input(
    grad_output: np.ndarray,
    weight: np.ndarray,
    partition: Partition,
    active: int,
    input_shape: Sequence[int],
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> np.ndarray:
    """Compute the gradient of x, through w_s^(active).

    Args:
        grad_output: the gradient of conv2d's result, the weight's dtype.
        weight, partition, active, stride, padding, dilation, groups: as in conv2d.
        input_shape: the shape of x, [batch, in_channels, height, width].

    Returns:
        [batch, in_channels, height, width].

    Raises:
        ValueError, TypeError, InputError: as in conv2d.

    Example:
        >>> p = Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
        >>> conv2d_grad_input(np.ones((1, 4, 6, 6)), np.ones((4, 3, 3, 3)), p, 1, (1, 3, 8, 8)).shape
        (1, 3, 8, 8)
    """
    weight = check_weight("the weight", weight, partition)
    active = checked_number("active", active, partition)
    check_defaults(weight, partition)
    grad_output = check_like("grad_output", grad_output, "the weight", weight)
    input_shape = _checked_input_shape(input_shape)
    geometry = _Geometry(input_shape, partition, stride, padding, dilation, groups)
    geometry.check_output(grad_output)
    grad_x = np.empty(geometry.input, weight.dtype)
    _library.conv2d_grad_input(grad_output, weight, geometry.numbers, groups, partition.native, active, grad_x)
    return np.ascontiguousarray(grad_x[:, :, : input_shape[2], : input_shape[3]])


def conv2d_grad_weight(
    grad_output: np.ndarray,
    x: np.ndarray,
    partition: Partition,
    update: int,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> np.ndarray:
    """Compute the gradient of the weight at the entries of partition `update`, exactly 0 elsewhere (Eq. 3).

    The gradient of a bias is grad_output.sum((0, 2, 3)); for a bias [C, out], it is the gradient of row `update`.

    Args:
        grad_output: the gradient of conv2d's result, x's dtype.
        x: [batch, in_channels, height, width].
        partition: the weight's partition.
        update: the partition, in 1..C.
        stride, padding, dilation, groups: as in conv2d.

    Returns:
        The gradient, in the weight's shape.

    Raises:
        ValueError, TypeError, InputError: as in conv2d.

    Example:
        >>> p = Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
        >>> conv2d_grad_weight(np.ones((1, 4, 6, 6)), np.ones((1, 3, 8, 8)), p, update=2).shape
        (4, 3, 3, 3)
    """
    update = checked_number("update", update, partition)
    x = checked("x", x)
    grad_output = check_like("grad_output", grad_output, "x", x)
    geometry = _Geometry(x.shape, partition, stride, padding, dilation, groups)
    geometry.check_output(grad_output)
    grad_w = np.empty(partition.shape, x.dtype)
    padded = geometry.padded(x)
    _library.conv2d_grad_weight(grad_output, padded, geometry.numbers, groups, partition.native, update, grad_w)
    return grad_w


def _checked_input_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(map(plain, shape)) if isinstance(shape, Iterable) else ()
    if len(sizes) != 4 or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"input_shape={shape!r}; pass x.shape, [batch, in_channels, height, width].")
    return sizes


class _Geometry:
    """The checked geometry of a convolution: (stride, padding, dilation), and the shapes of its input and output.

    With padding='same' and an even kernel, one end is padded more; the input is then larger than x by this padding.
    """

    def __init__(
        self,
        x: tuple[int, ...],
        partition: Partition,
        stride: int | Sequence[int],
        padding: int | Sequence[int] | str,
        dilation: int | Sequence[int],
        groups: int,
    ) -> None:
        weight, groups = partition.shape, plain(groups)
        if len(weight) != 4:
            raise ValueError(f"the weight has shape {weight}; conv2d takes [out, in / groups, height, width].")
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or weight[0] % groups:
            raise ValueError(f"groups={groups!r}; pass an int that divides the weight's {weight[0]} output channels.")
        if len(x) != 4 or x[1] != weight[1] * groups:
            raise InputError(
                f"x has shape {x}; this weight with groups={groups} takes [batch, {weight[1] * groups}, height, width]."
            )
        *numbers, self.more = convolution_geometry(x[2:], weight[2:], stride, padding, dilation)
        self.numbers = numbers
        self.input = *x[:2], *(n + m for n, m in zip(x[2:], self.more, strict=True))
        left = [
            n + 2 * p - d * (k - 1) - 1 for n, p, d, k in zip(self.input[2:], *numbers[1:], weight[2:], strict=True)
        ]
        self.output = x[0], weight[0], *(n // s + 1 for n, s in zip(left, numbers[0], strict=True))

    def padded(self, x: np.ndarray) -> np.ndarray:
        """Return x with the additional padding."""
        return np.pad(x, [(0, 0), (0, 0), *((0, more) for more in self.more)]) if any(self.more) else x

    def check_output(self, grad_output: np.ndarray) -> None:
        if grad_output.shape != self.output:
            raise InputError(f"grad_output has shape {grad_output.shape}; this convolution makes {self.output}.")
