"""HyperLinear: torch's linear layer as a best response."""

from __future__ import annotations

from torch import Tensor, nn

from partkernels.operators import dense
from partnets.stn.layer import HyperLayer
from partnets.stn.vector import is_each

# With at least this many positions in an example, such as a sequence's, the example's own weight is formed: this costs
# as much as the product with some twenty positions, and saves one product forward, one for dx and two for parameters.
MERGED = 48
# Bytes of examples' own weights at a time, where they are multiplied as a batch.
MERGED_BYTES = 64 << 20


class _Matmul:
    """The product x W^T for x [batch, ..., in_features]."""

    rows_dim = -1

    def __call__(self, x, weight):
        return dense.linear(x, weight)

    def add(self, y, x, weight):
        if dense.is_ours(x, weight):
            return y.add_(dense.linear(x, weight))
        y.view(-1, len(weight)).addmm_(x.flatten(0, -2), weight.t())  # fuses product and addition
        return y

    def gradients(self, grad, x, weight, needs):
        return (
            dense.linear_grad_input(grad, weight) if needs[0] else None,
            dense.linear_grad_weight(grad, x) if needs[1] else None,
        )

    def at_a_time(self, x, weight):
        positions = x.shape[1:-1].numel()
        if positions < MERGED or len(x) == 0:
            return 0
        # On CPUs a batch of products takes 1.2 to 2.1 times F.linear's time, successive products 1.06 to 1.23 times.
        return 1 if x.device.type == "cpu" else max(1, MERGED_BYTES // (weight.numel() * weight.element_size()))

    def each(self, x, weights):
        if len(x) == 1:
            return dense.linear(x, weights[0])
        return (x.flatten(1, -2) @ weights.mT).view(*x.shape[:-1], weights.shape[1])

    def each_gradients(self, grad, x, weights, needs):
        if len(x) == 1:
            grad_x, grad_weight = self.gradients(grad, x, weights[0], needs)
            return grad_x, None if grad_weight is None else grad_weight[None]
        flat = grad.flatten(1, -2)
        return (flat @ weights).view(x.shape) if needs[0] else None, flat.mT @ x.flatten(1, -2) if needs[1] else None


MATMUL = _Matmul()


class HyperLinear(HyperLayer, nn.Linear):
    """torch.nn.Linear as a best response: y_i = (W + (V λ_i) ⊙ W_hyper) x_i + b + (C λ_i) ⊙ b_hyper.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.
        hyper: the stn.HyperVector λ that the layer reads.

    Attributes:
        weight, hyper_weight: W and W_hyper, [out_features, in_features].
        bias, hyper_bias: b and b_hyper, [out_features].
        weight_scale, bias_scale: V and C, [out_features, n].

    Shapes:
        x [..., in_features] to [..., out_features].

    Raises:
        ValueError: each example has its own λ, and x has another number of examples.

    Example:
        >>> from partnets import hyper, stn
        >>> import torch
        >>> layer = HyperLinear(4, 3, hyper=stn.HyperVector(hyper.ConcreteDropout(0.5)))
        >>> layer
        HyperLinear(in_features=4, out_features=3, bias=True, hyper=1)
        >>> layer(torch.ones(2, 4)).shape
        torch.Size([2, 3])
    """

    ordinary = nn.Linear
    # The dimension of the examples in x, if it differs from the rest of the model.
    batch_dim: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        dim = self.vector.batch_dim if self.batch_dim is None else self.batch_dim
        input, hyper = self.given(input, -1, dim)
        if not is_each(hyper):
            return dense.linear(input, self.merged("weight", hyper), self.merged("bias", hyper))
        return self.responded(input.movedim(dim, 0), hyper, MATMUL).movedim(0, dim)
