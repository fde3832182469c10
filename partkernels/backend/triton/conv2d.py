"""conv2d: convolutions with a subnetwork's weight, as products over patches of the image that are never laid out.

A weight's column is (y * kernel_width + x) * channels + channel, as in its map. Channels are those of one group.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.conv2d import (
    conv2d_shape,
    empty_conv2d,
    empty_conv2d_grad_input,
    empty_conv2d_grad_weight,
    memory_format,
)
from partkernels.backend.triton import launch, plans
from partkernels.backend.triton.arithmetic import add_product
from partkernels.backend.triton.launch import strides_of
from partkernels.backend.triton.packed_map import tile_ids
from partkernels.backend.triton.plans import Config, Product
from partkernels.backend.triton.rebuild import GROUP, rebuild
from partkernels.backend.triton.subnetwork_weight import keep, rebuild_into
from partkernels.backend.triton.tiles import compute, store_tile, tile_of_group

Pair = tuple[int, int]


@triton.jit
def _pixel(i, height, width):
    """Image, row and column of the i-th pixel."""
    return i // (height * width), i // width % height, i % width


@triton.jit
def _at(image, channel, y, x, strides, INDEX: tl.constexpr):
    return (
        image.to(INDEX) * strides[0] + channel.to(INDEX) * strides[1]
        + y.to(INDEX) * strides[2] + x.to(INDEX) * strides[3]
    )  # fmt: skip


@triton.jit(do_not_specialize=("steps", *launch.WORDS))
def forward_kernel(
    x, weight, stored, bias, out, map,
    pixels, outputs, channels, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, steps,
    x0, x1, x2, x3, w0, w1, w2, w3, s0, s1, s2, s3, o0, o1, o2, o3, share, map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out = conv2d(x, w_k) + bias. Tiles are [output channel, pixel]; `part` is the group of channels.

    EVEN: the channels are a multiple of 64, so that a step of the sum is part of one tap.
    """
    part, first_output, first_pixel = tile_of_group(outputs, pixels, INDEX, DOWN, ACROSS)
    within = first_output + tl.arange(0, DOWN)
    output = part * outputs + within
    row = (part * outputs + tl.minimum(within, outputs - 1)).to(INDEX)[:, None]
    drawn_row = (part * outputs + first_output + first_row + tl.arange(0, DOWN))[:, None]
    pixel = first_pixel + tl.arange(0, ACROSS)
    image, out_y, out_x = _pixel(pixel, out_height, out_width)
    # Pixels beyond the last see nothing: no row of the image is where they look.
    top = tl.where(pixel < pixels, out_y * stride_y - padding_y, -0x40000000)
    left = out_x * stride_x - padding_x
    first_channel = tl.zeros_like(image) + part * channels
    pixel_at = _at(image, first_channel, top, left, (x0, x1, x2, x3), INDEX)[None, :]
    map += row[:, :, None] * map_stride

    cols = kernel_height * kernel_width * channels
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(tl.cast(cols, INDEX), GROUP))
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        group = tl.cast(first + i, INDEX)
        column = group * GROUP + tl.arange(0, GROUP)
        # One tap, or one for each column.
        tap = (tl.full((1,), 0, tl.int32) + group * GROUP) // channels if EVEN else column // channels
        channel = column - tap * channels
        tap_y, tap_x = tap // kernel_width, tap % kernel_width
        weight_at = _at(tl.zeros_like(tap), channel, tap_y, tap_x, (w0, w1, w2, w3), INDEX)[None, :]
        w_tile = tl.load(
            weight + (row * w0 + weight_at), None if EVEN else (column < cols)[None, :], None if EVEN else 0
        )
        stored_tile = w_tile
        if KIND == "stored":
            stored_at = _at(tl.zeros_like(tap), channel, tap_y, tap_x, (s0, s1, s2, s3), INDEX)[None, :]
            stored_tile = tl.load(stored + (row * s0 + stored_at), None if EVEN else (column < cols)[None, :])
        down, right = tap_y * dilation_y, tap_x * dilation_x
        in_y = top[None, :] + down[:, None]
        in_x = left[None, :] + right[:, None]
        # Below 0 is beyond any size, unsigned.
        seen = (in_y.to(tl.uint32) < tl.cast(height, tl.uint32)) & (in_x.to(tl.uint32) < tl.cast(width, tl.uint32))
        if not EVEN:
            seen &= (column < cols)[:, None]
        tap_at = _at(tl.zeros_like(tap), channel, down, right, (x0, x1, x2, x3), INDEX)[:, None]
        x_tile = tl.load(x + (pixel_at + tap_at), seen, 0)
        w_tile = rebuild(
            w_tile, stored_tile, map, drawn_row, group, row_bytes, low, addend, below,
            step, seed_low, seed_high, stream_low, stream_high, first_group, BITS, KIND, EVEN, ASM,
        )  # fmt: skip
        total = add_product(total, w_tile, x_tile, PRECISION)
    at = _at(image, tl.zeros_like(image), out_y, out_x, (o0, o1, o2, o3), INDEX)
    # Rows are counted in their group, biases over all.
    if bias is not None:
        bias += part * outputs
    store_tile(total, bias, out, within, pixel, outputs, pixels, output.to(INDEX) * o1, at, share)


@triton.jit(do_not_specialize=("steps", *launch.WORDS))
def grad_input_kernel(
    grad, weight, stored, out, map,
    pixels, outputs, channels, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, steps,
    g0, g1, g2, g3, w0, w1, w2, w3, s0, s1, s2, s3, o0, o1, o2, o3, share, map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out = the gradient of conv2d's x. Tiles are [pixel, channel]; the channels are a multiple of 64.

    Each step of the sum is 64 output channels of one tap.
    """
    part, first_pixel, first_channel = tile_of_group(pixels, channels, INDEX, DOWN, ACROSS)
    pixel = first_pixel + tl.arange(0, DOWN)
    channel = first_channel + tl.arange(0, ACROSS)
    image, y, x = _pixel(pixel, height, width)
    blocks = tl.cdiv(outputs, GROUP)
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, kernel_height * kernel_width * blocks)
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        tap = (first + i) // blocks
        tap_y, tap_x = tap // kernel_width, tap % kernel_width
        within = (first + i) % blocks * GROUP + tl.arange(0, GROUP)
        output = part * outputs + within
        scaled_y = y + padding_y - tap_y * dilation_y
        scaled_x = x + padding_x - tap_x * dilation_x
        out_y, out_x = scaled_y // stride_y, scaled_x // stride_x
        seen = (pixel < pixels) & (scaled_y >= 0) & (scaled_x >= 0) & (out_y < out_height) & (out_x < out_width)
        seen &= (out_y * stride_y == scaled_y) & (out_x * stride_x == scaled_x)
        seen_tile = seen[:, None] & (within < outputs)[None, :]
        grad_at = _at(image, tl.zeros_like(image), out_y, out_x, (g0, g1, g2, g3), INDEX)[:, None]
        grad_tile = tl.load(grad + (grad_at + output.to(INDEX)[None, :] * g1), seen_tile, 0)
        # Output channels beyond the last are the last again, and meet a gradient of 0.
        row = (part * outputs + tl.minimum(within, outputs - 1)).to(INDEX)[:, None]
        inside = (within < outputs)[:, None] & (channel < channels)[None, :]
        tap_at = tap_y.to(INDEX) * w2 + tap_x.to(INDEX) * w3
        w_tile = tl.load(weight + (tap_at + row * w0 + channel.to(INDEX)[None, :] * w1), inside, 0)
        stored_tile = w_tile
        if KIND == "stored":
            tap_at = tap_y.to(INDEX) * s2 + tap_x.to(INDEX) * s3
            stored_tile = tl.load(stored + (tap_at + row * s0 + channel.to(INDEX)[None, :] * s1), inside, 0)
        w_tile = rebuild(
            w_tile, stored_tile, map + row[:, :, None] * map_stride, (output + first_row)[:, None],
            (tap * channels + first_channel) // GROUP,
            row_bytes, low, addend, below, step, seed_low, seed_high, stream_low, stream_high, first_group,
            BITS, KIND, False, ASM,
        )  # fmt: skip
        total = add_product(total, grad_tile, w_tile, PRECISION)
    at = _at(image, tl.zeros_like(image), y, x, (o0, o1, o2, o3), INDEX)
    channel_at = (part * channels + channel).to(INDEX) * o1
    store_tile(total, None, out, pixel, channel, pixels, channels, at, channel_at, share)


@triton.jit(do_not_specialize=("steps", "update"))
def grad_weight_kernel(
    grad, x, out, map,
    pixels, outputs, channels, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, steps,
    g0, g1, g2, g3, x0, x1, x2, x3, o0, o1, o2, o3, share, map_stride, update,
    BITS: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out = the gradient of conv2d's weight at the entries of partition update, 0 elsewhere.

    Tiles are [output channel, column]; each step of the sum is 64 pixels.
    """
    cols = kernel_height * kernel_width * channels
    part, first_output, first_column = tile_of_group(outputs, cols, INDEX, DOWN, ACROSS)
    within = first_output + tl.arange(0, DOWN)
    output = part * outputs + within
    column = first_column + tl.arange(0, ACROSS)
    tap = column // channels
    channel = column - tap * channels
    tap_y, tap_x = tap // kernel_width, tap % kernel_width
    down = tap_y * dilation_y - padding_y
    right = tap_x * dilation_x - padding_x
    group_channel = part * channels + channel
    tap_at = _at(tl.zeros_like(tap), group_channel, down, right, (x0, x1, x2, x3), INDEX)[None, :]
    output_at = output.to(INDEX)[:, None] * g1

    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(tl.cast(pixels, INDEX), GROUP))
    total = tl.zeros((DOWN, ACROSS), tl.float32)
    for i in range(tl.maximum(last - first, 1)):
        pixel = tl.cast(first + i, INDEX) * GROUP + tl.arange(0, GROUP)
        image, out_y, out_x = _pixel(pixel, out_height, out_width)
        grad_at = _at(image, tl.zeros_like(image), out_y, out_x, (g0, g1, g2, g3), INDEX)[None, :]
        grad_tile = tl.load(grad + (grad_at + output_at), (within < outputs)[:, None] & (pixel < pixels)[None, :], 0)
        in_y = (out_y * stride_y)[:, None] + down[None, :]
        in_x = (out_x * stride_x)[:, None] + right[None, :]
        seen = (in_y.to(tl.uint32) < tl.cast(height, tl.uint32)) & (in_x.to(tl.uint32) < tl.cast(width, tl.uint32))
        seen &= (pixel < pixels)[:, None] & (column < cols)[None, :]
        x_at = _at(image, tl.zeros_like(image), out_y * stride_y, out_x * stride_x, (x0, x1, x2, x3), INDEX)[:, None]
        total = add_product(total, grad_tile, tl.load(x + (x_at + tap_at), seen, 0), PRECISION)
    map += (part * outputs).to(tl.int64) * map_stride
    owner = tile_ids(map, within[:, None], first_column, outputs, cols, map_stride, BITS, ACROSS)
    total = tl.where(owner == update - 1, total, 0)
    column_at = _at(tl.zeros_like(tap), channel, tap_y, tap_x, (o0, o1, o2, o3), INDEX)
    store_tile(total, None, out, within, column, outputs, cols, output.to(INDEX) * o0, column_at, share)


def _index(pixels: int, *tensors: Tensor) -> tl.dtype:
    return launch.index_type(
        pixels, *(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    )


def _sizes(
    x_size, out_size, kernel_size: Pair, channels: int, groups: int, stride: Pair, padding: Pair, dilation: Pair
):
    """What every kernel is told of the geometry, but for the number of pixels that it walks over."""
    sizes = {
        "outputs": out_size[1] // groups,
        "channels": channels,
        "height": x_size[2],
        "width": x_size[3],
        "out_height": out_size[2],
        "out_width": out_size[3],
        "kernel_height": kernel_size[0],
        "kernel_width": kernel_size[1],
    }
    for name, pair in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        sizes[f"{name}_y"], sizes[f"{name}_x"] = pair
    return sizes


def _product(
    operator: str, sizes: tuple[int, int, int], uses: int, x: Tensor, bits: int, kind: str,
    kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int,
) -> Product:  # fmt: skip
    """sizes are down, across and depth."""
    tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"
    is_channels_last = memory_format(x) == torch.channels_last
    geometry = *kernel_size, *stride, *padding, *dilation, groups, is_channels_last
    return Product(operator, *sizes, uses, x.dtype, bits, kind, tf32, launch.gpu(x.device), geometry)


def _rebuilt(weight: Tensor, like: Tensor, active: int, *partition) -> Tensor:
    """The subnetwork's weight, whole: it is small beside the images. In their memory format, which is then kept."""
    out = torch.empty_like(weight, memory_format=memory_format(like))
    return rebuild_into(out, weight, active, *partition)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    active: int, update: int | None, map: Tensor, stored: Tensor | None, count: int, kind: str, *draw,
) -> Tensor:  # fmt: skip
    geometry = stride, padding, dilation
    bias = live_bias(bias, active)

    def dense(weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, *geometry, groups).contiguous(memory_format=memory_format(x))

    if active == count:
        return dense(weight)
    out_shape = conv2d_shape(x, weight, *geometry)
    if 0 in out_shape:
        return empty_conv2d(x, weight, bias, *geometry, groups)
    partition = map, stored, count, kind, *draw
    pixels, channels = out_shape[0] * prod(out_shape[2:]), weight.shape[1]
    sizes = _sizes(x.shape, out_shape, weight.shape[2:], channels, groups, *geometry)
    shape = sizes["outputs"], pixels, weight[0].numel()
    product = _product("conv2d", shape, pixels, x, bits_for(count), kind, weight.shape[2:], *geometry, groups)

    def fused(config: Config) -> Tensor:
        default = weight if stored is None else stored
        out = empty_conv2d(x, weight, bias, *geometry, groups)  # not before: PyTorch's convolution allocates its own
        return compute(
            out, forward_kernel, product, config, groups, x=x, weight=weight, stored=default, bias=bias, pixels=pixels,
            **sizes, **strides_of(x=x, w=weight, s=default, o=out), share=out.numel(),
            EVEN=channels % GROUP.value == 0, INDEX=_index(pixels, x, weight, default, out, map),
            **launch.subnetwork(active, *partition),
        )  # fmt: skip

    return plans.run(product, fused, lambda: dense(_rebuilt(weight, x, active, *partition)))


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: tuple[int, int, int, int], stride: Pair, padding: Pair,
    dilation: Pair, groups: int, active: int, update: int | None, map: Tensor, stored: Tensor | None, count: int,
    kind: str, *draw,
) -> Tensor:  # fmt: skip
    geometry = stride, padding, dilation

    def dense(weight: Tensor) -> Tensor:
        grad = torch.nn.grad.conv2d_input(input_size, weight, grad_output, *geometry, groups)
        return grad.contiguous(memory_format=memory_format(grad_output))

    if active == count:
        return dense(weight)
    if grad_output.numel() == 0:
        return empty_conv2d_grad_input(grad_output, weight, input_size).zero_()
    partition = map, stored, count, kind, *draw
    channels = weight.shape[1]
    pixels = input_size[0] * prod(input_size[2:])
    sizes = _sizes(input_size, grad_output.shape, weight.shape[2:], channels, groups, *geometry)
    depth = sizes["kernel_height"] * sizes["kernel_width"] * -(-sizes["outputs"] // plans.TERMS) * plans.TERMS
    uses = grad_output.numel() // grad_output.shape[1]
    product = _product(
        "conv2d_grad_input", (pixels, channels, depth), uses, grad_output, bits_for(count), kind,
        weight.shape[2:], *geometry, groups,
    )  # fmt: skip

    def fused(config: Config) -> Tensor:
        default = weight if stored is None else stored
        out = empty_conv2d_grad_input(grad_output, weight, input_size)
        return compute(
            out, grad_input_kernel, product, config, groups, grad=grad_output, weight=weight, stored=default,
            pixels=pixels, **sizes, **strides_of(g=grad_output, w=weight, s=default, o=out), share=out.numel(),
            INDEX=_index(pixels, grad_output, weight, default, out, map),
            **launch.subnetwork(active, *partition),
        )  # fmt: skip

    # A tile of the weight is columns of one tap; only then are they whole groups of its map.
    fits = channels % GROUP.value == 0
    return plans.run(product, fused if fits else None, lambda: dense(_rebuilt(weight, grad_output, active, *partition)))


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    update: int, map: Tensor, count: int,
) -> Tensor:  # fmt: skip
    geometry = stride, padding, dilation
    out = empty_conv2d_grad_weight(grad_output, x, kernel_size, *geometry, groups)
    if grad_output.numel() == 0:
        return out.zero_()
    sizes = _sizes(x.shape, grad_output.shape, kernel_size, out.shape[1], groups, *geometry)
    pixels = grad_output.numel() // grad_output.shape[1]
    shape = sizes["outputs"], out[0].numel(), pixels
    product = _product("conv2d_grad_weight", shape, pixels, x, bits_for(count), "none", kernel_size, *geometry, groups)

    def fused(config: Config) -> Tensor:
        return compute(
            out, grad_weight_kernel, product, config, groups, grad=grad_output, x=x, pixels=pixels, **sizes,
            **strides_of(g=grad_output, x=x, o=out), share=out.numel(),
            map=map, map_stride=map.stride(0), update=update, BITS=bits_for(count),
            INDEX=_index(pixels, grad_output, x, out),
        )  # fmt: skip

    def rebuilt() -> Tensor:
        grad = torch.nn.grad.conv2d_weight(x, out.shape, grad_output, *geometry, groups)
        return keep(out, grad, update, update, map, count)

    return plans.run(product, fused, rebuilt)
