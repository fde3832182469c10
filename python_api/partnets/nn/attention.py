"""MultiheadAttention: torch's, with partitioned projections."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partkernels
from partkernels import Partition, Uniform, Units
from partnets.nn.layer import PartitionedLayer
from partnets.nn.linear import Linear
from partnets.nn.nesting import Nesting
from partnets.utils import seeds


class Attention(nn.Module):
    """A mixin for torch.nn.MultiheadAttention: its forward, with projections of a subclass's own.

    torch's reads all parameters at once, as those of an ordinary layer.
    """

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The queries, keys and values of all heads, each [batch, length, embed_dim]."""
        raise NotImplementedError

    def row(self, name: str) -> Tensor:
        """bias_k or bias_v, [1 or batch, 1, embed_dim]."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = _each((query, key, value), lambda x: x.unsqueeze(0))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _each((query, key, value), lambda x: x.transpose(0, 1))
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal=True without attn_mask; pass the mask too, as torch.nn.MultiheadAttention asks."
            )

        q, k, v = self.projected(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask, q)
        if self._parameters.get("bias_k") is not None:
            k, v = (
                torch.cat([x, self.row(name).expand(len(x), 1, -1)], 1) for x, name in ((k, "bias_k"), (v, "bias_v"))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - key.shape[1]))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0

        weights = None
        if need_weights:
            scores = q * math.sqrt(1 / self.head_dim) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores, broadcast to [batch, heads, queries, keys]."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, like)
            # [queries, keys], or [batch * heads, queries, keys]
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (len(like), self.num_heads))
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, like)[:, None, None]
            mask = padding if mask is None else mask + padding
        return mask


class MultiheadAttention(Attention, PartitionedLayer, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, each of whose projections is that of the live subnetwork.

    Args:
        embed_dim ... dtype: as in torch.nn.MultiheadAttention.
        proportions, seed, defaults, scheme: as in partnets.Linear.

    Attributes:
        in_proj_weight: [3 embed_dim, embed_dim]; or q_proj_weight, k_proj_weight and v_proj_weight where kdim or vdim
            differ.
        in_proj_bias: [C, 3 embed_dim]; bias_k, bias_v: [C, 1, 1, embed_dim]; without the C if it is 1.
        out_proj: a partnets.Linear.
        partitions, count, active, update: see PartitionedLayer.

    Shapes:
        As torch.nn.MultiheadAttention; padded batches as nested tensors are not taken.

    Raises:
        ValueError: as in partnets.Linear; and torch.nn.MultiheadAttention's own errors.

    Example:
        >>> layer = MultiheadAttention(8, 2, batch_first=True, proportions=(0.5, 0.5), seed=0)
        >>> x = torch.ones(3, 5, 8)
        >>> layer(x, x, x)[0].shape
        torch.Size([3, 5, 8])
    """

    ordinary = nn.MultiheadAttention
    weights = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    shifts = ("in_proj_bias", "bias_k", "bias_v")

    unit_dim = -1
    unit_inputs = 3
    unit_names = ("embed_dim",)

    @classmethod
    def can_nest(cls, layer):
        return layer.bias_k is None and super().can_nest(layer)

    @classmethod
    def may_take_few(cls, layer, inputs):
        return False

    @classmethod
    def may_be_narrow(cls, layer, outputs):
        return False  # heads have one size

    @classmethod
    def inner_units(cls, layer):
        return layer.embed_dim

    def nested_partition(self, name, shape, nesting):
        rows = Units(nesting.inner.segments * (shape[0] // nesting.inner.size))
        return Partition.nested(shape, rows, self._units_or_all(nesting.inputs, shape[1], nesting))

    def units_of_parameter(self, name, nesting):
        return Units(nesting.inner.segments * 3)

    def live_block(self, name, value, partition, active):
        return value

    def divide(self, proportions, *, seed, defaults, scheme="weight"):
        seed = seeds.random() if seed is None else seed
        super().divide(proportions, seed=seed, defaults=defaults, scheme=scheme)
        if self.nesting is not None:
            scheme = Nesting(self.nesting.outputs, self.nesting.inner)
        # torch.nn.TransformerEncoderLayer asks this before it reads our parameters as if they were torch's.
        self._qkv_same_embed_dim = False
        self.out_proj = Linear.from_ordinary(
            self.out_proj, proportions, seed=seeds.derived(seed, "out_proj"), defaults=defaults, scheme=scheme
        )

    def to_ordinary(self, active):
        new = super().to_ordinary(active)
        new._qkv_same_embed_dim = new.in_proj_weight is not None
        new.out_proj = self.out_proj.to_ordinary(active)
        return new

    def to_fresh(self):
        new = super().to_fresh()
        new.out_proj = self.out_proj.to_fresh()
        return new

    def usual_distribution(self, name):
        if name not in self.weights:
            return None
        # torch.nn.init.xavier_uniform_
        return functools.partial(Uniform, math.sqrt(6 / sum(self._parameters[name].shape)))

    def reset_parameters(self):
        """As PartitionedLayer.reset_parameters, for the output's projection too."""
        self.out_proj.reset_parameters()
        super().reset_parameters()

    def row(self, name):
        return self.live(name)

    def projected(self, query, key, value):
        bias = self.live("in_proj_bias")
        if self._parameters.get("in_proj_weight") is None:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return [self._project(x, name, b) for x, name, b in zip((query, key, value), names, biases, strict=True)]
        return in_one_product(
            query, key, value, lambda x, *rows: self._project(x, "in_proj_weight", bias, *rows), self.embed_dim
        )

    def _project(self, x: Tensor, name: str, bias: Tensor | None, start: int | None = None, stop: int | None = None):
        """x times the transpose of a weight, or of its rows start..stop, plus as much of the bias."""
        weight, partition = self._parameters[name], self.partitions[name]
        if self.update is None:
            weight = weight.detach()
        if start is not None:
            weight, partition = weight[start:stop], partition.rows(start, stop)
            bias = None if bias is None else bias[start:stop]
        return partkernels.linear(x, weight, partition, self.active, update=self.update, bias=bias)


def in_one_product(
    query: Tensor, key: Tensor, value: Tensor, project: Callable[..., Tensor], width: int
) -> list[Tensor]:
    """The queries, keys and values by a weight that has the rows of all three, in as few products as can be.

    Args:
        project: project(x, start, stop) by these rows of the weight, or project(x) by all.
        width: how many rows each of the three has.
    """
    if query is key and key is value:
        return list(project(query).chunk(3, -1))
    cuts = [(query, 0, 1), (key, 1, 3)] if key is value else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    projected = [project(x, start * width, stop * width).chunk(stop - start, -1) for x, start, stop in cuts]
    return [x for part in projected for x in part]


def _each(inputs: tuple[Tensor, ...], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """function of each; those that are one tensor stay one."""
    done = {id(x): function(x) for x in inputs}
    return [done[id(x)] for x in inputs]


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask that is True where nothing is attended, as one that is added; others are that already."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)
