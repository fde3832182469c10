"""HyperEmbedding: torch's embedding layer as a best response."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.vector import is_each


@dataclass(frozen=True)
class _Rows:
    """The product that looks up rows of a table by their indices."""

    padding_idx: int | None
    scale_grad_by_freq: bool

    rows_dim = -1

    def __call__(self, x, weight):
        return F.embedding(x, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)

    def add(self, y, x, weight):
        return y.add_(self(x, weight))

    def gradients(self, grad, x, weight, needs):
        if not needs[1]:
            return None, None
        padding = -1 if self.padding_idx is None else self.padding_idx
        backward = torch.ops.aten.embedding_dense_backward
        return None, backward(grad, x, len(weight), padding, self.scale_grad_by_freq)

    def at_a_time(self, x, weight):
        return 0


class HyperEmbedding(HyperLayer, nn.Embedding):
    """torch.nn.Embedding as a best response: W_j + (V λ_i) ⊙ W_hyper,j for the word j of example i.

    V λ scales the columns, not the rows, as the columns are the outputs.

    Args:
        num_embeddings ... dtype: as in torch.nn.Embedding; max_norm and sparse must be off.
        hyper: the stn.HyperVector λ that the layer reads.

    Attributes:
        weight, hyper_weight: W and W_hyper, [num_embeddings, embedding_dim].
        weight_scale: V, [embedding_dim, n].

    Shapes:
        ids [...] to [..., embedding_dim].

    Raises:
        ValueError: max_norm or sparse is on; or each example has its own λ, and ids has another number of examples.

    Example:
        >>> from partnets import hyper, stn
        >>> vector = stn.HyperVector(hyper.ConcreteDropout(0.5))
        >>> HyperEmbedding(10, 4, hyper=vector)(torch.tensor([[1, 2, 1]])).shape
        torch.Size([1, 3, 4])
    """

    ordinary = nn.Embedding
    responding = ("weight",)

    def rows(self, name: str) -> int:
        return 1

    @classmethod
    def serves(cls, layer):
        return super().serves(layer) and layer.max_norm is None and not layer.sparse

    def begin_response(self, vector):
        asked = [name for name in ("max_norm", "sparse") if getattr(self, name)]
        if asked:
            raise ValueError(
                f"an Embedding with {' and '.join(asked)} cannot be a best response, as these change the table or its"
                " gradient by whole rows; turn them off, or name the layer in skip=."
            )
        super().begin_response(vector)

    def forward(self, input: Tensor) -> Tensor:
        input, hyper = self.given(input)
        rows = _Rows(self.padding_idx, self.scale_grad_by_freq)
        if not is_each(hyper):
            return rows(input, self.merged("weight", hyper))
        dim = self.vector.batch_dim
        return self.responded(input.movedim(dim, 0), hyper, rows).movedim(0, dim)
