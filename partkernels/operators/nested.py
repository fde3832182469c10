"""Operators of a nested partition: dense products of views of what is live. Nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.backend import dispatch
from partkernels.operators import dense
from partkernels.partition import NestedPartition

_convolution = torch.ops.aten.convolution
_convolution_backward = torch.ops.aten.convolution_backward


class _Linear:
    """x W^T: rows of W are outputs, columns inputs; both are the last dimension of y and x."""

    name, kind = "linear", ()

    def takes_blocks(self, partition: NestedPartition, active: int) -> bool:
        return True

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return dense.linear(x, weight)

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return dense.linear_grad_input(grad, weight)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, rows: slice, cols: slice) -> Tensor:
        return dense.linear_grad_weight(grad[..., rows], x[..., cols])


class _Convolution:
    """A convolution, whose rows are outputs and columns inputs; transposed, the other way round."""

    name = "convolution"

    def __init__(self, stride, padding, dilation, transposed: bool, output_padding, groups: int, of_group: int) -> None:
        self.geometry = [*map(list, (stride, padding, dilation))], transposed, list(output_padding)
        self.groups, self.of_group = groups, of_group
        self.kind = groups, transposed

    def takes_blocks(self, partition: NestedPartition, active: int) -> bool:
        """Not if nothing is live; of several groups, if those that are live are whole, with all of their columns."""
        if 0 in (partition.row_ends[active - 1], partition.col_ends[active - 1]):
            return False
        if self.groups == 1:
            return True
        whole = not any(end % self.of_group for end in partition.row_ends)
        return whole and not self.kind[1] and len({*partition.col_ends}) == 1

    def _geometry(self, weight: Tensor) -> tuple:
        (stride, padding, dilation), transposed, output_padding = self.geometry
        groups = 1 if self.groups == 1 else len(weight) // self.of_group
        return stride, padding, dilation, transposed, output_padding, groups

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return _convolution(x, weight, None, *self._geometry(weight))

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        like = grad.new_empty(1).expand(shape)
        return _convolution_backward(grad, like, weight, None, *self._geometry(weight), [True, False, False])[0]

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, rows: slice, cols: slice) -> Tensor:
        if self.geometry[1]:
            grad, x = grad[:, cols], x[:, rows]
        elif self.groups == 1:
            grad, x = grad[:, rows], x[:, cols]
        else:
            first, last = rows.start // self.of_group, rows.stop // self.of_group
            grad, x = grad[:, rows], x[:, first * cols.stop : last * cols.stop]
        part = weight[rows, cols]
        return _convolution_backward(grad, x, part, None, *self._geometry(part), [False, True, False])[1]


class _Product(torch.autograd.Function):
    """A product with the live block of a weight; of its gradient only the strips of one partition are computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, product: _Linear | _Convolution, live: tuple, strips: list) -> Tensor:
        return product.forward(x, weight[live])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, ctx.product, ctx.live, ctx.strips = inputs
        ctx.x_shape = x.shape
        needs_x = ctx.needs_input_grad[1] and bool(ctx.strips)
        ctx.save_for_backward(x if needs_x else None, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.product.grad_input(grad, weight[ctx.live], ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.new_zeros(weight.shape)
            for strip in ctx.strips:
                grad_weight[strip] = ctx.product.grad_weight(grad, x, weight, *strip)
        return grad_x, grad_weight, None, None, None


class _Kept(torch.autograd.Function):
    """A tensor's block, 0 elsewhere, whose gradient is kept in other blocks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, blocks: list, learning: list) -> Tensor:
        out = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for block in blocks:
            out[block] = tensor[block]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.blocks, ctx.learning = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Kept.apply(grad, ctx.learning, ctx.blocks), None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, partition: NestedPartition, active: int, update: int | None,
    narrow: bool,
) -> Tensor:  # fmt: skip
    """As partkernels.linear, whose arguments have been checked."""
    return _multiply(-1, _Linear(), x, weight, bias, partition, active, update, narrow)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence, transposed: bool, output_padding: Sequence[int],
    groups: int, partition: NestedPartition, active: int, update: int | None, narrow: bool,
) -> Tensor:  # fmt: skip
    """As partkernels.conv2d or conv_transpose2d, in any number of dimensions, of a batch and with checked arguments."""
    product = _Convolution(*geometry, transposed, output_padding, groups, partition.shape[0] // groups)
    return _multiply(1, product, x, weight, bias, partition, active, update, narrow)


def inputs(partition: NestedPartition, active: int, groups: int = 1, transposed: bool = False) -> int:
    """How many inputs a product with subnetwork `active` needs; those after them meet zeros."""
    if transposed:
        return partition.row_ends[active - 1]
    if groups == 1:
        return partition.col_ends[active - 1]
    return -(-partition.row_ends[active - 1] // (partition.shape[0] // groups)) * partition.shape[1]


def outputs(partition: NestedPartition, active: int, groups: int = 1, transposed: bool = False) -> int:
    """How many outputs of a product with subnetwork `active` are not 0 for all inputs; those after them are."""
    if not transposed:
        return partition.row_ends[active - 1]
    return partition.col_ends[active - 1] if groups == 1 else partition.shape[1] * groups


def _multiply(
    dim: int, product: _Linear | _Convolution, x: Tensor, weight: Tensor, bias: Tensor | None,
    partition: NestedPartition, active: int, update: int | None, narrow: bool,
) -> Tensor:  # fmt: skip
    """The live outputs with their bias, and, unless narrow, the others, which are their bias alone."""
    x, weight, bias = _cast(x, weight, bias)
    count, made = (outputs(partition, each, *product.kind) for each in (active, partition.count))
    if dispatch.requested() != "reference" and product.takes_blocks(partition, active):
        live, strips = partition.live(active), [] if update is None else partition.strips(update)
        dispatch.note_torch(product.name, "nested: a dense product of what is live")
        x = x.narrow(dim, 0, inputs(partition, active, *product.kind))
        y = _Product.apply(x, weight.detach() if update is None else weight, product, live, strips)
    else:
        dispatch.note_torch(product.name, "nested: a dense product, with zeros where nothing is live")
        x = _widened(x, dim, inputs(partition, partition.count, *product.kind))
        y = product.forward(x, subnetwork_weight(weight, partition, active, update)).narrow(dim, 0, count)
    if bias is not None:
        bias = bias.view(made, *[1] * (y.dim() - 2 if dim == 1 else 0))
        y = y + bias[:count]
    if narrow or count == made:
        return y
    shape = list(y.shape)
    shape[dim] = made - count
    rest = y.new_zeros(shape) if bias is None else bias[count:].expand(shape)
    return torch.cat([y, rest], dim)


def _widened(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim) if shape[dim] else x


def subnetwork_weight(weight: Tensor, partition: NestedPartition, active: int, update: int | None) -> Tensor:
    """As partkernels.subnetwork_weight."""
    strips = [] if update is None else partition.strips(update)
    if dispatch.requested() == "reference":  # by the definition of its partitions
        ids = partition.ids().to(weight.device)
        learning = weight.detach() if update is None else torch.where(ids == update, weight, weight.detach())
        return torch.where(ids <= active, learning, 0).contiguous()
    return _Kept.apply(weight.detach() if update is None else weight, [partition.live(active)], strips)


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None, partition: NestedPartition, active: int, update: int | None
) -> Tensor:
    """As partkernels.embedding."""
    return F.embedding(ids, subnetwork_weight(weight, partition, active, update), padding_idx)


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Under torch.autocast, in its dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [one if one is None else one.to(dtype) for one in tensors]
