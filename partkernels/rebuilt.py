"""conv2d of the cpu backend by PyTorch's own convolution: a subnetwork's weight is rebuilt for it, a MiB at a time.

oneDNN's convolutions run at the processor's peak, and a weight is small beside the images that it meets: rebuilding it
takes a hundredth of the time. The largest slice that is ever rebuilt has WORKSPACE bytes.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from partkernels import outputs

_cpu = torch.ops.partkernels_cpu
_convolution_backward = torch.ops.aten.convolution_backward.default
WORKSPACE = 1 << 20
# What oneDNN's convolutions like numbers of channels to be multiples of; also a tile of the rebuilding kernel.
CHANNELS = 64
# Up to so many input channels, and without strides, our own input gradient is two to four times as fast as oneDNN's. It
# is that of a network's first layer, which ordinary training never computes and every update of a hyperparameter does.
FEW_CHANNELS = 4
# For contiguous images of other than a multiple of 8 channels oneDNN is at its slowest. Made channels_last first, these
# numbers of input channels took 0.4 to 0.9 of the time, copies included; the error is up to 1.4 times as large in the
# output, and two thirds in the weight's gradient.
CHANNELS_LAST = {"conv2d": {17, 18, 19, 20, 21, 22, 23}, "conv2d_grad_weight": set(range(9, 24)) - {16}}


def slices(weight: Tensor, dim: int, groups: int) -> list[slice]:
    """The slices of a weight along a dimension that are rebuilt one after another; none if that is not possible."""
    size = weight.shape[dim]
    most = WORKSPACE * size // (weight.numel() * weight.element_size())
    if most >= size:
        return [slice(0, size)]
    if groups > 1 or most == 0:
        return []
    most = max(most // CHANNELS * CHANNELS, min(most, CHANNELS))
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]


def crashes(images: Tensor) -> bool:
    """Whether PyTorch's convolution might: in bfloat16, for channels_last images one pixel wide (seen in 2.13)."""
    return images.dtype == torch.bfloat16 and 1 in images.shape[2:]


def _faster_channels_last(work: str, channels: int, groups: int) -> bool:
    return groups == 1 and channels in CHANNELS_LAST[work]


def _rebuild(
    weight: Tensor, rows: slice, ins: slice, active: int, partition: tuple, format: torch.memory_format | None = None
) -> Tensor:
    """w_k[rows, ins], in the format given or else the weight's, as PyTorch would convolve the weight itself."""
    size = rows.stop - rows.start, ins.stop - ins.start, *weight.shape[2:]
    out = _in_workspace(size, weight.dtype, format or outputs.memory_format(weight))
    _cpu.subnetwork_weight(out, weight, rows.start, ins.start, active, *partition)
    return out


# Kept from call to call: the first touch of fresh memory costs more than rebuilding a weight in it.
_kept = threading.local()


def _in_workspace(size: tuple[int, ...], dtype: torch.dtype, format: torch.memory_format) -> Tensor:
    """An empty tensor of this size in this thread's workspace; the next one takes its place."""
    if not hasattr(_kept, "workspace"):
        with torch.inference_mode(False):
            _kept.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cpu")
    out, channels, height, width = size
    entries = _kept.workspace.view(dtype)[: out * channels * height * width]
    if format == torch.channels_last:
        return entries.view(out, height, width, channels).permute(0, 3, 1, 2)
    return entries.view(size)


def _whole(weight: Tensor, dim: int) -> slice:
    return slice(0, weight.shape[dim])


def _backward(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: tuple, which: int) -> Tensor:
    *pairs, groups = geometry
    mask = [which == 0, which == 1, False]
    return _convolution_backward(grad_output, x, weight, None, *pairs, False, [0, 0], groups, mask)[which]


def conv2d(x, weight, bias, geometry, slices, active, partition):
    *pairs, groups = geometry
    # oneDNN follows the weight's format.
    format = torch.channels_last if _faster_channels_last("conv2d", weight.shape[1], groups) else None

    def convolve(rows: slice) -> Tensor:
        part = _rebuild(weight, rows, _whole(weight, 1), active, partition, format)
        return torch.convolution(x, part, None if bias is None else bias[rows], *pairs, False, [0, 0], groups)

    if len(slices) == 1:
        return convolve(slices[0]).contiguous(memory_format=outputs.memory_format(x))
    y = outputs.conv2d(x, weight, bias, *geometry)
    for rows in slices:
        y[:, rows] = convolve(rows)
    return y


def conv2d_grad_input(grad_output, weight, input_size, geometry, slices, active, partition):
    def convolve(ins: slice) -> Tensor:
        part = _rebuild(weight, _whole(weight, 0), ins, active, partition)
        channels = ins.stop - ins.start if len(slices) > 1 else input_size[1]
        size = input_size[0], channels, *input_size[2:]
        return _backward(grad_output, grad_output.new_empty(1).expand(size), part, geometry, 0)

    (stride, *_, groups), (channels, *_) = geometry, weight.shape[1:]
    if channels <= FEW_CHANNELS and groups == 1 and max(stride) == 1 and len(slices) == 1:
        grad_x = outputs.conv2d_grad_input(grad_output, weight, input_size)
        whole = _rebuild(weight, _whole(weight, 0), _whole(weight, 1), active, partition)
        _cpu.few_channels_grad_input(grad_x, grad_output, whole, *geometry)
        return grad_x
    if len(slices) == 1:
        return convolve(slices[0]).contiguous(memory_format=outputs.memory_format(grad_output))
    grad_x = outputs.conv2d_grad_input(grad_output, weight, input_size)
    for ins in slices:
        grad_x[:, ins] = convolve(ins)
    return grad_x


def conv2d_grad_weight(grad_output, x, kernel_size, geometry, update, map, count):
    size = grad_output.shape[1], x.shape[1] // geometry[-1], *kernel_size
    if _faster_channels_last("conv2d_grad_weight", x.shape[1], geometry[-1]):
        grad_output, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad_output, x))
    dense = _backward(grad_output, x, x.new_empty(1).expand(size), geometry, 1)
    kept = dense if dense.is_contiguous() else torch.empty(size, dtype=dense.dtype)
    _cpu.subnetwork_weight_grad(kept, dense, update, update, map, count)
    return kept
