"""HyperLinear, HyperConv1d, 2d, 3d and HyperEmbedding: torch's layers of one product as best responses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from partkernels.operators import dense
from partnets.stn.layer import HyperLayer
from partnets.stn.products import MATMUL, Convolution, Lookup
from partnets.stn.vector import is_each


class HyperLinear(HyperLayer, nn.Linear):
    """A best response in place of torch.nn.Linear: y_i = (W + (V λ_i) ⊙ W_hyper) x_i + b + (C λ_i) ⊙ b_hyper."""

    # The dimension of the examples in x, if it differs from the rest of the model.
    batch_dim: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        dim = self.vector.batch_dim if self.batch_dim is None else self.batch_dim
        hyper = self.hyper_of(input, -1, dim)
        if not is_each(hyper):
            return dense.linear(input, self.merged("weight", hyper), self.merged("bias", hyper))
        return self.responded(input.movedim(dim, 0), hyper, MATMUL).movedim(0, dim)


class _HyperConvolution(HyperLayer):
    def forward(self, input: Tensor) -> Tensor:
        hyper = self.hyper_of(input, -len(self.kernel_size) - 1)
        if not is_each(hyper):
            return self._conv_forward(input, self.merged("weight", hyper), self.merged("bias", hyper))
        if input.dim() != len(self.kernel_size) + 2 or self.vector.batch_dim % input.dim() != 0:
            raise ValueError(
                f"x is {list(input.shape)}, but each example has its own hyperparameters; pass x as [batch,"
                " channels, ...], and batch_dim=0 to stn.convert."
            )
        # Padding before and after each dimension, the last dimension first.
        around = self._reversed_padding_repeated_twice
        front, behind = tuple(around[-2::-2]), tuple(around[::-2])
        if self.padding_mode != "zeros":
            input, front = F.pad(input, around, mode=self.padding_mode), (0,) * len(front)
        elif front != behind:
            input, front = F.pad(input, around), (0,) * len(front)
        return self.responded(input, hyper, Convolution(self.stride, front, self.dilation, self.groups))


class HyperConv1d(_HyperConvolution, nn.Conv1d):
    """A best response in place of torch.nn.Conv1d."""


class HyperConv2d(_HyperConvolution, nn.Conv2d):
    """A best response in place of torch.nn.Conv2d."""


class HyperConv3d(_HyperConvolution, nn.Conv3d):
    """A best response in place of torch.nn.Conv3d."""


class HyperEmbedding(HyperLayer, nn.Embedding):
    """A best response in place of torch.nn.Embedding: W_j + (V λ_i) ⊙ W_hyper,j for the word j of example i.

    V λ scales the columns, not the rows, as the columns are the outputs.
    """

    responding = ("weight",)

    def rows(self, name: str) -> int:
        return 1

    @classmethod
    def serves(cls, layer: nn.Module) -> bool:
        # max_norm and sparse change the table or its gradient by whole rows.
        return super().serves(layer) and layer.max_norm is None and not layer.sparse

    def forward(self, input: Tensor) -> Tensor:
        hyper = self.hyper_of(input)
        lookup = Lookup(self.padding_idx, self.scale_grad_by_freq)
        if not is_each(hyper):
            return lookup(input, self.merged("weight", hyper))
        dim = self.vector.batch_dim
        return self.responded(input.movedim(dim, 0), hyper, lookup).movedim(0, dim)
