"""The C++ backend: csrc/cpu, which rebuilds a subnetwork's weight block by block and never holds all of it.

float32, float64 and bfloat16 (accumulated in float32); threads are PyTorch's own. Linear layers are multiplied there,
faster than by PyTorch; convolutions are PyTorch's own, for what rebuilt.py makes of a weight, MiB by MiB. The
convolutions of csrc/cpu serve the few cases that are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels import outputs, packed_map, rebuilt

_cpu = torch.ops.partkernels_cpu


def _matrix(x: Tensor) -> Tensor:
    """x [..., features] as a matrix: a view, unless its leading dimensions don't collapse into one."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def linear(x, weight, bias, active, update, *partition):
    y = outputs.linear(x, weight)
    _cpu.linear(_matrix(y), _matrix(x), weight, _bias(bias), active, *partition)
    return y


def linear_grad_input(grad_output, weight, active, update, *partition):
    grad_x = outputs.linear_grad_input(grad_output, weight)
    _cpu.linear_grad_input(_matrix(grad_x), _matrix(grad_output), weight, active, *partition)
    return grad_x


def linear_grad_weight(grad_output, x, update, map, count):
    grad_weight = outputs.linear_grad_weight(grad_output, x)
    _cpu.linear_grad_weight(grad_weight, _matrix(grad_output), _matrix(x), update, map, count)
    return grad_weight


def conv2d(x, weight, bias, stride, padding, dilation, groups, active, update, *partition):
    geometry = stride, padding, dilation, groups
    slices = rebuilt.slices(weight, 0, groups)
    if rebuilt.crashes(x) or not slices:
        y = outputs.conv2d(x, weight, bias, *geometry)
        _cpu.conv2d(y, x, weight, _bias(bias), *geometry, active, *partition)
        return y
    return rebuilt.conv2d(x, weight, bias, geometry, slices, active, partition)


def conv2d_grad_input(grad_output, weight, input_size, stride, padding, dilation, groups, active, update, *partition):
    geometry = stride, padding, dilation, groups
    slices = rebuilt.slices(weight, 1, groups)
    if rebuilt.crashes(grad_output) or not slices:
        grad_x = outputs.conv2d_grad_input(grad_output, weight, input_size)
        _cpu.conv2d_grad_input(grad_x, grad_output, weight, *geometry, active, *partition)
        return grad_x
    return rebuilt.conv2d_grad_input(grad_output, weight, input_size, geometry, slices, active, partition)


def conv2d_grad_weight(grad_output, x, kernel_size, stride, padding, dilation, groups, update, map, count):
    geometry = stride, padding, dilation, groups
    if rebuilt.crashes(x):
        grad_weight = outputs.conv2d_grad_weight(grad_output, x, kernel_size, *geometry)
        _cpu.conv2d_grad_weight(grad_weight, grad_output, x, *geometry, update, map, count)
        return grad_weight
    return rebuilt.conv2d_grad_weight(grad_output, x, kernel_size, geometry, update, map, count)


def _weight(weight: Tensor | None) -> Tensor | None:
    """A weight of 3, or more than 4, dimensions as one of 4: the columns stay in their order."""
    if weight is None or weight.dim() in (1, 2, 4):
        return weight
    return weight.unsqueeze(-1) if weight.dim() == 3 else weight.flatten(2, -2)


def subnetwork_weight(weight, active, map, stored, *partition):
    out = outputs.subnetwork_weight(weight)
    _cpu.subnetwork_weight(_weight(out), _weight(weight), 0, 0, active, map, _weight(stored), *partition)
    return out


def subnetwork_weight_grad(grad, first, last, map, count):
    out = outputs.subnetwork_weight_grad(grad)
    _cpu.subnetwork_weight_grad(_weight(out), _weight(grad), first, last, map, count)
    return out


def _step(operator, written: list[Tensor | None], grad: Tensor, map: Tensor | None, *rest) -> None:
    """An optimiser's step. written: the parameter and its state."""
    tensors = [*written, grad]
    if map is None and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        views = [None if tensor is None else tensor.view(1, -1) for tensor in tensors]
    else:
        views = [_weight(tensor) for tensor in tensors]
    operator(*views, map, *rest)
    for tensor, view in zip(written, views, strict=False):
        # Where no view in 4 dimensions has a weight's strides, it was a copy.
        if tensor is not None and view.data_ptr() != tensor.data_ptr():
            tensor.copy_(view.reshape(tensor.shape))


def sgd_step(parameter, grad, momentum_buffer, *rest):
    _step(_cpu.sgd_step, [parameter, momentum_buffer], grad, *rest)


def adam_step(parameter, grad, exp_avg, exp_avg_sq, *rest):
    _step(_cpu.adam_step, [parameter, exp_avg, exp_avg_sq], grad, *rest)


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    width = packed_map.row_bytes(cols, packed_map.bits_for(len(sizes)))
    map = torch.zeros(rows, width, dtype=torch.uint8, device="cpu")
    _cpu.random_map(map, cols, sizes, seed)
    return map


def drawn(kind, step, seed, stream, shape, dtype, device):
    rows, cols = packed_map.matrix_shape(shape)
    matrix = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)  # what every default is
    # The weight of a subnetwork of which no entry is live: every row has the same map, of partition 2 alone.
    dead = torch.full((1, packed_map.row_bytes(cols, bits=1)), 0xFF, dtype=torch.uint8, device=device).expand(rows, -1)
    _cpu.subnetwork_weight(matrix, matrix, 0, 0, 1, dead, None, 2, kind, step, seed, stream)
    return packed_map.from_matrix(matrix, shape).to(dtype).contiguous()
