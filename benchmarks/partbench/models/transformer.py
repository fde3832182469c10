"""Block, a transformer layer, and TransformerLM, a language model of a billion parameters."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partkernels import Normal


class Block(nn.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)), with GELU.

    It has 12 width^2 + 13 width parameters, all but 13 width of them in four nn.Linear layers.

    Args:
        width: features of each token.
        heads: a divisor of width.
        causal: whether a token attends only to itself and to earlier ones.

    Shapes:
        x [batch, length, width]; returns the same shape.

    Example:
        >>> Block(width=16, heads=2, causal=True)(torch.zeros(3, 5, 16)).shape
        torch.Size([3, 5, 16])
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerLM(nn.Module):
    """A decoder-only language model similar to GPT-2; returns logits of the next token.

    It has 1 013 686 272 parameters by default: 805.7 million in 16 blocks, 102.9 million in the token embedding, as
    many in the head, and 2.1 million in the position embedding. Head and token embedding are not tied, so that all
    matrix products can be partitioned. In float32 the parameters take 4 GB; `with torch.device("meta")` makes the model
    without them.

    Args:
        vocabulary: number of tokens; GPT-2's by default.
        context: the maximum sequence length.
        width: features of each token.
        depth: number of blocks.
        heads: a divisor of width.

    Shapes:
        tokens [batch, length], int64 in 0..vocabulary - 1, length at most context; returns [batch, length, vocabulary].

    Raises:
        ValueError: a sequence is longer than context.

    Example:
        >>> model = TransformerLM(vocabulary=100, context=8, width=16, depth=2, heads=2)
        >>> model(torch.zeros(3, 5, dtype=torch.int64)).shape
        torch.Size([3, 5, 100])
    """

    def __init__(
        self, vocabulary: int = 50257, context: int = 1024, width: int = 2048, depth: int = 16, heads: int = 16
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # As in GPT-2. With torch's N(0, 1), the embeddings would dominate the blocks' initial outputs.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
            embedding.seed_defaults = functools.partial(Normal, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(f"the sequences have {length} tokens, more than context={context}; pass shorter ones.")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.norm(self.blocks(x)))
