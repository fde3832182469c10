"""respond: a product with weights scaled differently for each example, p(W, x_i) + (V λ_i) ⊙ p(W_hyper, x_i).

The backward pass recomputes p(W_hyper, x) and V λ; only x, λ and the parameters are saved. There are two algorithms,
and the product selects the faster one:

- two products of the batch, the second added to the first in place;
- one product with each example's own weight, W + (V λ_i) ⊙ W_hyper, if an example has many positions. One product then
  gives all parameters' gradients too: from the gradients dW_i of the examples' weights, dW is the sum of dW_i, dW_hyper
  is the sum of (V λ_i) ⊙ dW_i, and d(V λ_i) is <dW_i, W_hyper> for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from partnets.utils.traced import is_traced


class Product(Protocol):
    """y = p(W, x), bilinear; dimension 0 is the examples in x and y, and the rows in W."""

    rows_dim: int = -1  # the dimension of y for the rows of W

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return y, differentiable."""

    def add(self, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Add the product to y, in place."""
        return y.add_(self(x, weight))

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx and dW, or None where not needed."""

    def at_a_time(self, x: Tensor, weight: Tensor) -> int:
        """Return how many examples' weights to form at a time; 0 if two products are faster."""
        return 0

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return y for weights [batch, *W.shape], one for each example."""

    def each_gradients(
        self, grad: Tensor, x: Tensor, weights: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx and the gradient of weights, or None where not needed."""


def respond(
    x: Tensor,
    hyper: Tensor,
    weight: Tensor,
    hyper_weight: Tensor,
    weight_scale: Tensor,
    product: Product,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """Compute p(W, x_i) + (V λ_i) ⊙ p(W_hyper, x_i) + b + C λ_i for each example i.

    Args:
        x: [batch, ...].
        hyper: λ, [batch, n].
        weight, hyper_weight: W and W_hyper, [rows, ...].
        weight_scale: V, [rows, n].
        product: p.
        bias: b, [rows], or None.
        bias_scale: C, each row times its entry of b_hyper, [rows, n]; None without a bias.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        scales = [
            None if each is None else each.float() if each.itemsize < 4 else each for each in (weight_scale, bias_scale)
        ]
        arguments = x, hyper.to(scales[0].dtype), weight, hyper_weight, *scales, bias
        return _definition(*arguments, product) if is_traced() else _Response.apply(*arguments, product)


def rows_of(hyper: Tensor, scale: Tensor) -> Tensor:
    """Compute V λ for each example, [batch, rows], padding n to a multiple of 16.

    MKL takes nearly twice as long for an inner dimension of 10 as for one of 16: 3 % of a product of 1024² and 256.
    """
    lacking = -scale.shape[1] % 16
    return F.pad(hyper, (0, lacking)) @ F.pad(scale, (0, lacking)).t()


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the computation: that of x, or the weight's if x contains indices."""
    return x.dtype if x.is_floating_point() else weight.dtype


def _definition(x, hyper, weight, hyper_weight, weight_scale, bias_scale, bias, product):
    dtype = _dtype(x, weight)
    y = product(x, hyper_weight.to(dtype))
    y = product(x, weight.to(dtype)) + _spread(rows_of(hyper, weight_scale), y, product).to(dtype) * y
    return y if bias is None else y + _spread(rows_of(hyper, bias_scale) + bias, y, product).to(dtype)


def _spread(rows: Tensor, y: Tensor, product: Product) -> Tensor:
    """Reshape rows, [batch, rows], to broadcast with y."""
    shape = [1] * y.dim()
    shape[0], shape[product.rows_dim] = rows.shape
    return rows.view(shape)


class _Response(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        hyper: Tensor,
        weight: Tensor,
        hyper_weight: Tensor,
        weight_scale: Tensor,
        bias_scale: Tensor | None,
        bias: Tensor | None,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x, hyper, weight, hyper_weight, weight_scale, bias_scale, bias)
        ctx.product, rows, dtype = product, rows_of(hyper, weight_scale), _dtype(x, weight)
        if step := product.at_a_time(x, weight):
            own = _own_weights(rows, weight, hyper_weight, step, dtype)
            found = [product.each(x[part], weights) for part, weights in own]
            y = found[0] if len(found) == 1 else torch.cat(found)
        else:
            y = product(x, hyper_weight.to(dtype))
            # Both factors in one dtype: on a CPU, PyTorch multiplies two dtypes without vectorisation.
            y.mul_(_spread(rows, y, product).to(dtype))
            y = product.add(y, x, weight.to(dtype))
        del rows
        if bias is not None:
            y.add_(_spread(rows_of(hyper, bias_scale).add_(bias), y, product).to(dtype))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arguments, product, needs = ctx.saved_tensors, ctx.product, ctx.needs_input_grad[:-1]
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():  # for second derivatives, differentiate the definition
                wanted = [argument for argument, needed in zip(arguments, needs, strict=True) if needed]
                y = _definition(*arguments, product)
                found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
                return *(next(found) if needed else None for needed in needs), None
            return *_gradients(grad, *arguments, product, needs), None


def _own_weights(rows, weight, hyper_weight, step: int, dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of `step` examples and these examples' weights."""
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        scale = rows[part].reshape(-1, len(weight), *[1] * (weight.dim() - 1))
        yield part, torch.addcmul(weight, scale, hyper_weight).to(dtype)


def _gradients(grad, x, hyper, weight, hyper_weight, weight_scale, bias_scale, bias, product, needs):
    rows = rows_of(hyper, weight_scale)
    if step := product.at_a_time(x, weight):
        found = _merged_gradients(grad, x, rows, weight, hyper_weight, product, needs, step)
    else:
        found = _two_gradients(grad, x, rows, weight, hyper_weight, product, needs)
    grad_x, grad_weight, grad_hyper_weight, grad_rows = found
    grad_hyper = grad_rows @ weight_scale if needs[1] else None
    grad_weight_scale = grad_rows.t() @ hyper if needs[4] else None
    grad_bias_scale = grad_bias = None
    if bias is not None:
        of_example = _summed(grad, product, rows.dtype)
        grad_hyper = grad_hyper.addmm_(of_example, bias_scale) if needs[1] else None
        grad_bias_scale = of_example.t() @ hyper if needs[5] else None
        grad_bias = of_example.sum(0).to(bias.dtype) if needs[6] else None
    return grad_x, grad_hyper, grad_weight, grad_hyper_weight, grad_weight_scale, grad_bias_scale, grad_bias


def _summed(y: Tensor, product: Product, dtype: torch.dtype) -> Tensor:
    """Sum y over all positions, to [batch, rows]."""
    others = [dim for dim in range(1, y.dim()) if dim != product.rows_dim % y.dim()]
    return y.sum(others, dtype=dtype) if others else y.to(dtype)


def _two_gradients(grad, x, rows, weight, hyper_weight, product, needs):
    dtype, grad_rows = _dtype(x, weight), None
    if needs[1] or needs[4]:
        grad_rows = _summed(product(x, hyper_weight.to(dtype)).mul_(grad), product, rows.dtype)
    grad_x, grad_weight = product.gradients(grad, x, weight.to(dtype), (needs[0], needs[2]))
    grad_hyper_weight = None
    if needs[0] or needs[3]:
        scaled = grad * _spread(rows, grad, product).to(dtype)
        more, grad_hyper_weight = product.gradients(scaled, x, hyper_weight.to(dtype), (needs[0], needs[3]))
        grad_x = None if more is None else grad_x.add_(more)
    return (
        grad_x,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_hyper_weight is None else grad_hyper_weight.to(weight.dtype),
        grad_rows,
    )


def _merged_gradients(grad, x, rows, weight, hyper_weight, product, needs, step):
    learns = needs[1] or needs[2] or needs[3] or needs[4]
    grad_weight = torch.zeros_like(weight) if needs[2] else None
    grad_hyper_weight = torch.zeros_like(hyper_weight) if needs[3] else None
    grads_x, grads_rows = [], []
    for part, weights in _own_weights(rows, weight, hyper_weight, step, x.dtype):
        grad_own_x, own = product.each_gradients(grad[part], x[part], weights, (needs[0], learns))
        grads_x.append(grad_own_x)
        if not learns:
            continue
        own, flat = own.to(weight.dtype), (len(weights), len(weight), -1)
        if needs[2]:
            grad_weight.add_(own.sum(0))
        if needs[3]:
            summed = torch.einsum("bri,br->ri", own.reshape(flat), rows[part].to(weight.dtype))
            grad_hyper_weight.add_(summed.view_as(weight))
        if needs[1] or needs[4]:
            grads_rows.append(own.mul_(hyper_weight).reshape(flat).sum(2).to(rows.dtype))
    return (
        torch.cat(grads_x) if needs[0] else None,
        grad_weight,
        grad_hyper_weight,
        torch.cat(grads_rows) if grads_rows else None,
    )
