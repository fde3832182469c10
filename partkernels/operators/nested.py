"""Operators of a nested partition: dense products of views of the active block. Nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.backend import dispatch
from partkernels.backend.bias import learning_bias
from partkernels.backend.reference.conv2d import memory_format
from partkernels.channels import Channels
from partkernels.operators import dense
from partkernels.operators.memory import no_view
from partkernels.operators.registration import is_transformed
from partkernels.partition import NestedPartition


class _Linear:
    """x W^T: the rows of W are outputs, its columns inputs, in the last dimensions of y and x."""

    name, kind = "linear", ()

    def takes_blocks(self, partition: NestedPartition, active: int) -> bool:
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return dense.linear(x, weight, bias)

    def grad_input(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return dense.linear_grad_input(grad, weight)

    def grad_weight(
        self, grad: Tensor, x: Tensor, weight: Tensor, rows: slice, cols: slice, out: Tensor | None = None
    ) -> Tensor:
        return dense.linear_grad_weight(grad[..., rows], x[..., cols], out)


class _Convolution:
    """conv2d: the rows of the weight are outputs, its columns inputs.

    Args:
        geometry: stride, padding and dilation.
        groups: the number of groups of the full weight.
        of_group: the number of rows per group.
    """

    name = "convolution"

    def __init__(self, geometry: tuple[Any, ...], groups: int, of_group: int) -> None:
        self.geometry, self.groups, self.of_group = geometry, groups, of_group
        self.kind = (groups,)

    def takes_blocks(self, partition: NestedPartition, active: int) -> bool:
        """Return whether active blocks are a product: nonempty and, with groups, whole groups with all columns."""
        rows, cols = partition.row_channels, partition.col_channels
        if 0 in (rows.number(active), cols.number(active)):
            return False
        whole = len(rows.segments) == 1 and not any(end % self.of_group for end in rows.segments[0]) and cols.is_whole
        return self.groups == 1 or whole

    def _geometry(self, rows: int) -> tuple:
        return *self.geometry, 1 if self.groups == 1 else rows // self.of_group

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return dense.conv2d(x, weight, bias, *self._geometry(len(weight)))

    def grad_input(self, grad: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
        return dense.conv2d_grad_input(grad, weight, size, *self._geometry(len(weight)))

    def grad_weight(
        self, grad: Tensor, x: Tensor, weight: Tensor, rows: slice, cols: slice, out: Tensor | None = None
    ) -> Tensor:
        if self.groups > 1:
            first, last = rows.start // self.of_group, rows.stop // self.of_group
            cols = slice(first * cols.stop, last * cols.stop)
        geometry = self._geometry(rows.stop - rows.start)
        return _into(out, dense.conv2d_grad_weight(grad[:, rows], x[:, cols], weight.shape[2:], *geometry))


class _Transposed(_Convolution):
    """conv_transpose2d, the input gradient of conv2d as a function of grad_output. The weight's rows are inputs.

    Args:
        size: the output's height and width.
        geometry, groups, of_group: those of that conv2d.
    """

    def __init__(self, size: Sequence[int], geometry: tuple[Any, ...], groups: int, of_group: int) -> None:
        super().__init__(geometry, groups, of_group)
        self.size, self.kind = size, (groups, True)

    def takes_blocks(self, partition: NestedPartition, active: int) -> bool:
        return self.groups == 1 and super().takes_blocks(partition, active)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        size = len(x), weight.shape[1] * self.groups, *self.size
        y = dense.conv2d_grad_input(x, weight, size, *self.geometry, self.groups)
        return y if bias is None else y + bias.view(-1, 1, 1)

    def grad_input(self, grad: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
        return dense.conv2d(grad, weight, None, *self.geometry)

    def grad_weight(
        self, grad: Tensor, x: Tensor, weight: Tensor, rows: slice, cols: slice, out: Tensor | None = None
    ) -> Tensor:
        return _into(out, dense.conv2d_grad_weight(x[:, rows], grad[:, cols], weight.shape[2:], *self.geometry))


def _into(out: Tensor | None, found: Tensor) -> Tensor:
    return found if out is None else out.copy_(found)


class _Product(torch.autograd.Function):
    """A product with a weight's active block; the weight's gradient is computed only in one partition's strips.

    Each strip comes with its position in the weight and in the active block. The bias has the active outputs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, product: _Linear | _Convolution, partition: NestedPartition,
        active: int, strips: list[Any], dim: int,
    ) -> Tensor:  # fmt: skip
        return no_view(product.forward(x, _live(weight, partition, active), bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.product, *ctx.live, ctx.strips, ctx.dim = inputs
        ctx.x_shape = x.shape
        needs_x = ctx.needs_input_grad[1] and bool(ctx.strips)
        ctx.save_for_backward(x if needs_x else None, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            partition, active = ctx.live
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                # grad_x may be differentiated in turn; then only the strips of the weight may receive a gradient.
                weight = _apply(_Kept, weight, partition.active_blocks(active), [strip for strip, _ in ctx.strips])
            grad_x = ctx.product.grad_input(grad, _live(weight, partition, active), ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(ctx, grad, x, weight)
        if ctx.needs_input_grad[2]:
            others = [dim for dim in range(grad.dim()) if dim != ctx.dim % grad.dim()]
            grad_bias = grad.sum(others) if others else grad
        return grad_x, grad_weight, grad_bias, *[None] * 5


def _grad_weight(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the weight's gradient: computed in the strips, 0 elsewhere."""
    if [rows.start == cols.start == 0 for (rows, cols), _ in ctx.strips] == [True]:
        ((rows, cols), _) = ctx.strips[0]  # partition 1, most of the weight: write each entry once
        out = grad.new_empty(weight.shape)
        out[rows.stop :] = 0
        out[: rows.stop, cols.stop :] = 0
    else:
        out = grad.new_zeros(weight.shape)
    can_write = not (torch.is_grad_enabled() or _is_followed())  # otherwise products would not be differentiable
    for strip, among in ctx.strips:
        if can_write:
            ctx.product.grad_weight(grad, x, weight, *among, out=out[strip])
        else:
            out[strip] = ctx.product.grad_weight(grad, x, weight, *among)
    return out


def _is_followed() -> bool:
    return torch.compiler.is_compiling() or is_transformed()


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run function.apply without its handling of torch.func and default arguments: 0.1 ms less of Python."""
    if _is_followed():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def _live(weight: Tensor, partition: NestedPartition, active: int) -> Tensor:
    """Return the active rows and columns of a weight; a view if they form one block."""
    return partition.col_channels.take(partition.row_channels.take(weight, 0, active), 1, active)


def _strips(partition: NestedPartition, active: int, update: int) -> list[tuple[tuple, tuple]]:
    """Return partition.strips(update), each with its position in the active block."""
    channels = partition.row_channels, partition.col_channels
    return [
        (strip, tuple(part.among(block, active) for part, block in zip(channels, strip, strict=True)))
        for strip in partition.strips(update)
    ]


class _Kept(torch.autograd.Function):
    """Blocks of a tensor, 0 elsewhere; only other blocks receive a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, blocks: list[Any], learning: list[Any]) -> Tensor:
        out = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for block in blocks:
            out[block] = tensor[block]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.blocks, ctx.learning = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _apply(_Kept, grad, ctx.learning, ctx.blocks), None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, partition: NestedPartition, active: int, update: int | None,
    narrow: bool,
) -> Tensor:  # fmt: skip
    """Compute partkernels.linear on checked arguments."""
    return _multiply(-1, _Linear(), x, weight, bias, partition, active, update, narrow)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], groups: int, partition: NestedPartition,
    active: int, update: int | None, narrow: bool,
) -> Tensor:  # fmt: skip
    """Compute partkernels.conv2d on a batch and checked arguments; geometry is stride, padding and dilation."""
    product = _Convolution(geometry, groups, partition.shape[0] // groups)
    return _multiply(1, product, x, weight, bias, partition, active, update, narrow)


def conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: Sequence[int], geometry: tuple[Any, ...], groups: int,
    partition: NestedPartition, active: int, update: int | None, narrow: bool,
) -> Tensor:  # fmt: skip
    """Compute partkernels.conv_transpose2d with an output of this height and width; see conv2d."""
    product = _Transposed(size, geometry, groups, partition.shape[0] // groups)
    return _multiply(1, product, x, weight, bias, partition, active, update, narrow)


def inputs(partition: NestedPartition, groups: int = 1, transposed: bool = False) -> Channels:
    """Return a product's input channels; subnetwork k needs the active ones, and the others multiply zeros."""
    if transposed:
        return partition.row_channels
    if groups == 1:
        return partition.col_channels
    of_group, (ends, *more) = partition.shape[0] // groups, partition.row_channels.segments
    if more:
        return Channels.whole(groups * partition.shape[1], partition.num_partitions)
    return Channels((tuple(-(-end // of_group) * partition.shape[1] for end in ends),))


def outputs(partition: NestedPartition, groups: int = 1, transposed: bool = False) -> Channels:
    """Return a product's output channels; the inactive ones are 0 for all inputs."""
    if not transposed:
        return partition.row_channels
    return (
        partition.col_channels if groups == 1 else Channels.whole(partition.shape[1] * groups, partition.num_partitions)
    )


def _multiply(
    dim: int, product: _Linear | _Convolution, x: Tensor, weight: Tensor, bias: Tensor | None,
    partition: NestedPartition, active: int, update: int | None, narrow: bool,
) -> Tensor:  # fmt: skip
    """Return the active outputs plus bias and, unless narrow, the inactive ones, which equal their bias."""
    x, weight, bias = _cast(x, weight, learning_bias(bias, active, update))
    images = {"memory_format": memory_format(x)} if dim == 1 else {}  # x and y keep it, even with few channels
    taken, made = inputs(partition, *product.kind), outputs(partition, *product.kind)
    few = None if bias is None else made.take(bias, 0, active)
    if dispatch.requested() != "reference" and product.takes_blocks(partition, active):
        dispatch.note_torch(product.name, "nested: a dense product of the active block")
        x = x if x.shape[dim] == taken.number(active) else taken.take(x, dim, active)
        x = x.contiguous(**images) if images else x
        if update is None:
            y = product.forward(x, _live(weight.detach(), partition, active), few)
        else:
            strips = _strips(partition, active, update)
            y = _apply(_Product, x, weight, few, product, partition, active, strips, dim)
    else:
        dispatch.note_torch(product.name, "nested: a dense product, with zeros for inactive entries")
        x = taken.spread(x, dim, active)
        y = product.forward(x, subnetwork_weight(weight, partition, active, update))
        y = made.take(y, dim, active)
        y = y if few is None else y + _beside(few, y, dim)
    if not narrow and made.number(active) < made.size:
        y = made.spread(y, dim, active)
        if bias is not None:
            dead = made.owners(y.device) > active
            y = y + _beside(torch.where(dead, bias, 0), y, dim)
    return y.contiguous(**images) if images else y


def _beside(bias: Tensor, y: Tensor, dim: int) -> Tensor:
    """Return a bias in a shape that broadcasts to outputs along a dimension."""
    return bias.view(-1, *[1] * (y.dim() - 2 if dim == 1 else 0))


def subnetwork_weight(weight: Tensor, partition: NestedPartition, active: int, update: int | None) -> Tensor:
    """Compute partkernels.subnetwork_weight."""
    strips = [] if update is None else partition.strips(update)
    if dispatch.requested() == "reference":  # by the definition, from partition ids
        ids = partition.ids().to(weight.device).view(weight.shape)  # a conv1d weight may have got a height of 1
        learning = weight.detach() if update is None else torch.where(ids == update, weight, weight.detach())
        return torch.where(ids <= active, learning, 0).contiguous()
    if len(partition.shape) == 1:
        return _vector(weight, partition.row_channels, active, update)
    return _apply(_Kept, weight.detach() if update is None else weight, partition.active_blocks(active), strips)


def _vector(vector: Tensor, channels: Channels, active: int, update: int | None) -> Tensor:
    """Compute subnetwork_weight of a vector by concatenating its few pieces."""
    pieces, still, start = [], vector.detach(), 0
    for ends in channels.segments:
        learns = (0, 0) if update is None else ((0, *ends)[update - 1], ends[update - 1])
        before, learning, after = (0, learns[0]), learns, (learns[1], ends[active - 1])
        for source, (first, last) in zip((still, vector, still), (before, learning, after), strict=True):
            if first < last or (source is vector and update is not None):  # its gradient must exist, even if empty
                pieces.append(source[start + first : start + last])
        if ends[active - 1] < ends[-1]:
            pieces.append(still.new_zeros(ends[-1] - ends[active - 1]))
        start += ends[-1]
    return torch.cat(pieces)


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None, partition: NestedPartition, active: int, update: int | None
) -> Tensor:
    """Compute partkernels.embedding on only the requested rows."""
    rows, cols = partition.owners(weight.device)
    owners = torch.maximum(rows[ids].unsqueeze(-1), cols)
    entries = F.embedding(ids, weight.detach() if update is None else weight, padding_idx)
    learning = entries if update is None else torch.where(owners == update, entries, entries.detach())
    return torch.where(owners <= active, learning, 0)


def _cast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast tensors to torch.autocast's dtype if it is enabled."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [one if one is None else one.to(dtype) for one in tensors]
