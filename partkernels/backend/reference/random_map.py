from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.formats import packed_map
from partkernels.formats.philox import philox4x32, split

# The third and fourth counter words of a map's draws: ASCII "part" separates them from the draws of defaults.
DOMAIN = (0, 0x70617274)
CHUNK = 1 << 20


def random_map(rows: int, cols: int, sizes: list[int], seed: int) -> Tensor:
    """Rank entries by (first Philox word of their index, index); the first sizes[0] are partition 1, and so on."""
    total = rows * cols
    words = torch.empty(total, dtype=torch.int64, device="cpu")
    for start in range(0, total, CHUNK):
        index = torch.arange(start, min(start + CHUNK, total), device="cpu")
        low, high = split(index)
        words[start : start + CHUNK] = philox4x32((low, high, *DOMAIN), seed)[0]
    numbers = torch.arange(len(sizes), dtype=torch.uint8, device="cpu")
    owners = numbers.repeat_interleave(torch.tensor(sizes, device="cpu"))
    ids = torch.empty(total, dtype=torch.uint8, device="cpu")
    ids[torch.argsort(words, stable=True)] = owners
    return packed_map.pack(ids.view(rows, cols), bits_for(len(sizes)))
