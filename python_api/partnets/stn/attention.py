"""HyperMultiheadAttention: torch's attention with projections that are best responses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.stn.layer import HyperLayer
from partnets.stn.linear import MATMUL, HyperLinear
from partnets.stn.response import respond
from partnets.stn.vector import is_each


class HyperMultiheadAttention(HyperLayer, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with projections that are best responses.

    Args:
        embed_dim ... dtype: as in torch.nn.MultiheadAttention.
        hyper: the stn.HyperVector λ that the layer reads.

    Attributes:
        in_proj_weight, ...: as torch's; hyper_in_proj_weight, in_proj_weight_scale, ...: as in stn.HyperLinear.
        out_proj: a HyperLinear.

    Shapes:
        As in torch.nn.MultiheadAttention; nested tensors are not supported.

    Raises:
        ValueError: each example has its own λ, and the inputs have another number of examples.

    Example:
        >>> from partnets import hyper, stn
        >>> vector = stn.HyperVector(hyper.Dropout(0.5))
        >>> layer = HyperMultiheadAttention(8, 2, batch_first=True, hyper=vector)
        >>> x = torch.ones(3, 5, 8)
        >>> layer(x, x, x)[0].shape
        torch.Size([3, 5, 8])
    """

    ordinary = nn.MultiheadAttention
    responding = (
        *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        *("in_proj_bias", "bias_k", "bias_v"),
    )

    def rows(self, name):
        return 2 if name in ("bias_k", "bias_v") else 0

    @classmethod
    def serves(cls, layer):
        # torch's layer contains the output projection as a submodule.
        return super().serves(layer) and HyperLinear.serves(layer.out_proj)

    def begin_response(self, vector):
        super().begin_response(vector)
        # torch.nn.TransformerEncoderLayer checks this before its fast path, which would ignore the response.
        self._qkv_same_embed_dim = False
        HyperLinear.convert(self.out_proj, vector)
        self.out_proj.batch_dim = 0  # inside attention, whatever the model's batch_dim

    def end_response(self, hyper):
        super().end_response(hyper)
        self._qkv_same_embed_dim = self.in_proj_weight is not None

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

        q, k, v = self._projected(query, key, value)
        mask = self._mask(attn_mask, key_padding_mask, q)
        if self._parameters.get("bias_k") is not None:
            k, v = (
                torch.cat([x, self._row(name).expand(len(x), 1, -1)], 1) for x, name in ((k, "bias_k"), (v, "bias_v"))
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

    def _row(self, name: str) -> Tensor:
        """Return bias_k or bias_v, [1 or batch, 1, embed_dim]."""
        hyper = self.vector.input()
        if not is_each(hyper):
            return self.merged(name, hyper)
        return self.value(name) + self.scale(name, hyper)[:, None] * self.value(f"hyper_{name}")

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the queries, keys and values of all heads, each [batch, length, embed_dim]."""
        if self._parameters.get("in_proj_weight") is None:
            parts = zip((query, key, value), ("q", "k", "v"), range(3), strict=True)
            return [
                self._project(x, f"{part}_proj_weight", i * self.embed_dim, (i + 1) * self.embed_dim)
                for x, part, i in parts
            ]
        return _in_few_products(
            query, key, value, lambda x, *rows: self._project(x, "in_proj_weight", *rows), self.embed_dim
        )

    def _project(self, x: Tensor, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Project x by these rows of a weight and of in_proj_bias; other weights than in_proj_weight have no slice."""
        x, hyper = self.given(x, -1, 0)
        of_weight = slice(start, stop) if name == "in_proj_weight" else slice(None)
        of_bias = slice(start, stop)
        if not is_each(hyper):
            weight, bias = self.merged(name, hyper), self.merged("in_proj_bias", hyper)
            return F.linear(x, weight[of_weight], None if bias is None else bias[of_bias])
        weights = (self.value(each)[of_weight] for each in (name, f"hyper_{name}", f"{name}_scale"))
        bias, offset = self.value("in_proj_bias"), ()
        if bias is not None:
            scale = self.value("hyper_in_proj_bias")[:, None] * self.value("in_proj_bias_scale")
            offset = bias[of_bias], scale[of_bias]
        return respond(x, hyper, *weights, MATMUL, *offset)

    def _drawn(self):
        drawn = {}
        for name in self.names():
            like = self._parameters[name]
            drawn[name] = torch.ones_like(like)  # for in_proj_bias, which starts at 0
            if name in ("bias_k", "bias_v"):
                nn.init.xavier_normal_(drawn[name])
            elif like.dim() == 2:
                nn.init.xavier_uniform_(drawn[name])
        return drawn


def _in_few_products(
    query: Tensor, key: Tensor, value: Tensor, project: Callable[..., Tensor], width: int
) -> list[Tensor]:
    """Return queries, keys and values by a weight that has the rows of all three; equal inputs share a product.

    Args:
        project: project(x, start, stop) by these rows of the weight, or project(x) by all.
        width: the number of rows of each of the three.
    """
    if query is key and key is value:
        return list(project(query).chunk(3, -1))
    cuts = [(query, 0, 1), (key, 1, 3)] if key is value else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    projected = [project(x, start * width, stop * width).chunk(stop - start, -1) for x, start, stop in cuts]
    return [x for part in projected for x in part]


def _each(inputs: tuple[Tensor, ...], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a function to each input; inputs that are the same tensor stay the same."""
    done = {id(x): function(x) for x in inputs}
    return [done[id(x)] for x in inputs]


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to scores; a boolean one is True at places without attention."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)
