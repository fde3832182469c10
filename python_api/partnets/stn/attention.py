"""HyperMultiheadAttention: torch's attention with projections that are best responses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.nn.attention import Attention, in_one_product
from partnets.stn.layer import HyperLayer
from partnets.stn.linear import MATMUL, HyperLinear
from partnets.stn.response import respond
from partnets.stn.vector import is_each


class HyperMultiheadAttention(Attention, HyperLayer, nn.MultiheadAttention):
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
        self.out_proj = HyperLinear.from_ordinary(self.out_proj, vector)
        self.out_proj.batch_dim = 0  # inside attention, whatever the model's batch_dim

    def to_ordinary(self, hyper):
        new = super().to_ordinary(hyper)
        new._qkv_same_embed_dim = new.in_proj_weight is not None
        new.out_proj = self.out_proj.to_ordinary(hyper)
        return new

    def row(self, name):
        hyper = self.vector.input()
        if not is_each(hyper):
            return self.merged(name, hyper)
        return self.value(name) + self.scale(name, hyper)[:, None] * self.value(f"hyper_{name}")

    def projected(self, query, key, value):
        if self._parameters.get("in_proj_weight") is None:
            parts = zip((query, key, value), ("q", "k", "v"), range(3), strict=True)
            return [
                self._project(x, f"{part}_proj_weight", i * self.embed_dim, (i + 1) * self.embed_dim)
                for x, part, i in parts
            ]
        return in_one_product(
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
