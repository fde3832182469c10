"""HyperMultiheadAttention: torch's attention, with projections that are best responses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.layers import HyperLinear
from partnets.stn.products import MATMUL
from partnets.stn.response import respond
from partnets.stn.vector import HyperVector, is_each


class HyperMultiheadAttention(HyperLayer, nn.MultiheadAttention):
    """A best response in place of torch.nn.MultiheadAttention; its out_proj is a HyperLinear.

    Layers with add_bias_kv, add_zero_attn, or another kdim or vdim than embed_dim stay torch's.
    """

    responding = ("in_proj_weight", "in_proj_bias")

    @classmethod
    def serves(cls, layer: nn.Module) -> bool:
        # torch's layer contains the output projection as a submodule.
        return super().serves(layer) and not layer.add_zero_attn and HyperLinear.serves(layer.out_proj)

    def begin_response(self, vector: HyperVector) -> None:
        super().begin_response(vector)
        # torch.nn.TransformerEncoderLayer checks this before its fast path, which would ignore the response.
        self._qkv_same_embed_dim = False
        HyperLinear.convert(self.out_proj, vector)
        self.out_proj.batch_dim = 0  # inside attention, whatever the model's batch_dim

    def end_response(self, hyper: Tensor) -> None:
        super().end_response(hyper)
        self._qkv_same_embed_dim = True

    def _drawn(self):
        weight = nn.init.xavier_uniform_(torch.empty_like(self._parameters["in_proj_weight"]))
        drawn = {"in_proj_weight": weight.detach(), "in_proj_bias": weight.new_ones(len(weight))}
        return {name: drawn[name] for name in self.names()}

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
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal=True without attn_mask; pass the mask too, as torch.nn.MultiheadAttention asks."
            )
        # Inputs that are the same tensor share a product.
        if query is key and key is value:
            inputs = [(query, 3)]
        else:
            inputs = [(query, 1), (key, 2)] if key is value else [(query, 1), (key, 1), (value, 1)]
        is_batched = query.dim() == 3
        projected: list[Tensor] = []
        for x, parts in inputs:
            if not is_batched:
                x = x.unsqueeze(0)
            elif not self.batch_first:
                x = x.transpose(0, 1)
            projected += self._project(x, len(projected), parts)
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected)
        mask = self._mask(attn_mask, key_padding_mask, q)
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

    def _project(self, x: Tensor, first: int, parts: int) -> tuple[Tensor, ...]:
        """Return parts of queries, keys and values, the first of which is number `first`, each [batch, length, E]."""
        hyper, rows = self.hyper_of(x, -1, 0), slice(first * self.embed_dim, (first + parts) * self.embed_dim)
        if not is_each(hyper):
            weight, bias = self.merged("in_proj_weight", hyper), self.merged("in_proj_bias", hyper)
            return F.linear(x, weight[rows], None if bias is None else bias[rows]).chunk(parts, -1)
        names = "in_proj_weight", "hyper_in_proj_weight", "in_proj_weight_scale"
        bias, offset = self.value("in_proj_bias"), ()
        if bias is not None:
            scale = self.value("hyper_in_proj_bias")[:, None] * self.value("in_proj_bias_scale")
            offset = bias[rows], scale[rows]
        return respond(x, hyper, *(self.value(name)[rows] for name in names), MATMUL, *offset).chunk(parts, -1)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, like: Tensor) -> Tensor | None:
        """Return both masks as one that is added to the scores, broadcast to [batch, heads, queries, keys]."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, like)
            # [queries, keys], or [batch * heads, queries, keys]
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (len(like), self.num_heads))
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, like)[:, None, None]
            mask = padding if mask is None else mask + padding
        return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to scores; a boolean one is True at places without attention."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)
