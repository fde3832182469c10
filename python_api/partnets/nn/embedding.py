"""Embedding and EmbeddingBag: torch's, with a partitioned table."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partkernels import Normal, Partition, Units
from partnets.nn.activation_checkpoint import same_subnetwork
from partnets.nn.layer import PartitionedLayer


class Table(PartitionedLayer):
    """What a table of rows has of its own: the padding's row, which no partition learns."""

    weights = ("weight",)
    unit_dim = -1
    unit_inputs = 0
    unit_names = ("embedding_dim",)

    def divide(self, proportions, **options):
        self._check_options()
        super().divide(proportions, **options)

    def _check_options(self) -> None:
        if self.max_norm or self.scale_grad_by_freq or self.sparse:
            asked = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(self, name)]
            raise ValueError(
                f"a {self.ordinary.__name__} with {', '.join(asked)} cannot be partitioned: these change the table, or"
                " its gradient, by whole rows; leave them out, or the layer with skip=."
            )

    def divided(self, name, weight, proportions, seed, scheme):
        partition = super().divided(name, weight, proportions, seed, scheme)
        if not self._is_padded(weight) or partition.count == 1:
            return partition
        # The padding's row never learns. In the first partition it stays as it is in every subnetwork.
        ids = partition.ids()
        ids[self.padding_idx] = 1
        return Partition.from_ids(ids, count=partition.count)

    def nested_partition(self, name, shape, nesting):
        return Partition.nested(shape, Units.whole(shape[0], nesting.outputs.count), nesting.outputs)

    def live_block(self, name, value, partition, active):
        return partition.col_units.take(value, 1, active) if self.is_narrow else value

    def _started(self, weight, defaults):
        started = super()._started(weight, defaults)
        if self._is_padded(weight):
            with torch.no_grad():
                started[self.padding_idx] = weight[self.padding_idx]
        return started

    def to_fresh(self):
        new = super().to_fresh()
        new._fill_padding_idx_with_zero()
        return new

    def nodes(self, name, shape):
        return torch.arange(shape[1], device="cpu")[None] if tuple(shape) == self._shape else super().nodes(name, shape)

    def usual_distribution(self, name):
        return functools.partial(Normal, 1.0)

    def drawn_entries(self, weight):
        if not self._is_padded(weight):
            return weight
        return torch.cat([weight[: self.padding_idx], weight[self.padding_idx + 1 :]])

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def _is_padded(self, weight: Tensor) -> bool:
        """Whether a weight has a row for the padding: the table, and what is like it."""
        return self.padding_idx is not None and tuple(weight.shape) == self._shape

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of the live subnetwork's table at ids, [..., embedding_dim]."""
        self._check_options()  # which may have been set since
        weight = self.own("weight")
        if self.update is None:
            weight = weight.detach()
        y = partkernels.embedding(
            ids, weight, self.partition, self.active, update=self.update, padding_idx=self.padding_idx
        )
        if self.is_narrow:
            y = self.partition.col_units.take(y, -1, self.active)
        return same_subnetwork(self, y)


class Embedding(Table, nn.Embedding):
    """torch.nn.Embedding, partitioned: rows of w_s^(k) for the live subnetwork k.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in torch.nn.Embedding. The padding's row stays as
            it is, in every subnetwork.
        max_norm, scale_grad_by_freq, sparse: must be off.
        proportions, seed, defaults, scheme: as in partnets.Linear; a node is one of the embedding_dim outputs.

    Attributes:
        weight: [num_embeddings, embedding_dim].
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        ids [...], int32 or int64, to [..., embedding_dim].

    Raises:
        ValueError: max_norm, scale_grad_by_freq or sparse is on; and as in partnets.Linear.

    Example:
        >>> layer = Embedding(10, 4, proportions=(0.5, 0.5), seed=0)
        >>> layer(torch.tensor([[1, 2, 1]])).shape
        torch.Size([1, 3, 4])
    """

    ordinary = nn.Embedding

    @classmethod
    def from_pretrained(cls, *args, proportions=(1.0,), seed=None, defaults="stored", scheme="weight", **kwargs):
        """As torch.nn.Embedding.from_pretrained, and then as `from_ordinary`; the given table stays."""
        layer = nn.Embedding.from_pretrained(*args, **kwargs)
        return cls.from_ordinary(layer, proportions, seed=seed, defaults=defaults, scheme=scheme)

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(input)


class EmbeddingBag(Table, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, partitioned: sums, means or maxima of rows of w_s^(k) for the live subnetwork k.

    Args:
        num_embeddings ... dtype: as in torch.nn.EmbeddingBag; max_norm, scale_grad_by_freq and sparse must be off.
        proportions, seed, defaults, scheme: as in partnets.Embedding.

    Attributes:
        weight: [num_embeddings, embedding_dim].
        partition, count, active, update: see PartitionedLayer.

    Shapes:
        ids [batch, bag], or [total] with offsets, to [batch, embedding_dim].

    Raises:
        ValueError: as in partnets.Embedding.

    Example:
        >>> layer = EmbeddingBag(10, 4, proportions=(0.5, 0.5), seed=0)
        >>> layer(torch.tensor([[1, 2, 1]])).shape
        torch.Size([1, 4])
    """

    ordinary = nn.EmbeddingBag

    @classmethod
    def from_pretrained(cls, *args, proportions=(1.0,), seed=None, defaults="stored", scheme="weight", **kwargs):
        """As torch.nn.EmbeddingBag.from_pretrained, and then as `from_ordinary`; the given table stays."""
        layer = nn.EmbeddingBag.from_pretrained(*args, **kwargs)
        return cls.from_ordinary(layer, proportions, seed=seed, defaults=defaults, scheme=scheme)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        # A table of the rows that are asked for, in the order in which they are; a last one stands for the padding.
        count = input.numel()
        table = F.pad(self.rows(input.reshape(-1)), (0, 0, 0, 1))
        ids = torch.arange(count, device=input.device).view(input.shape)
        if self.padding_idx is not None:
            ids = torch.where(input == self.padding_idx, count, ids)
        return F.embedding_bag(
            ids,
            table,
            None if offsets is None else offsets.to(ids.dtype),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else count,
        )
