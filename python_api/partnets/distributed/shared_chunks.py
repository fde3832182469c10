"""share: chunks that give each rank its part of every batch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Generator, Tensor

from partnets.data.chunks import Chunks


class SharedChunks(Chunks):
    """Chunks with sample and sample_upto that return this rank's part of the joint batch.

    Every rank draws the indices of the whole batch and fetches its part. With generators in the same state, any number
    of ranks together see the examples that one process would see.
    """

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(chunks.dataset, chunks.order, chunks.sizes, chunks.collate)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def _draws(self, count: int, batch_size: int, generator: Generator | None) -> Tensor:
        check_shared(self.ranks, batch_size=batch_size)
        return super()._draws(count, batch_size, generator).chunk(self.ranks)[self.rank]


def check_shared(ranks: int, parts: int = 1, **sizes: int) -> None:
    """Raise ValueError, naming it, if a batch size has no equal parts for all ranks, or for `parts` parts of each."""
    for name, size in sizes.items():
        if size % (ranks * parts):
            with_parts = f" with accumulate={parts}" if parts > 1 else ""
            raise ValueError(
                f"{name}={size} cannot be shared by {ranks} ranks{with_parts}; pass a multiple of {ranks * parts}."
            )


def share(chunks: Chunks, group: dist.ProcessGroup | None = None) -> Chunks:
    """Return chunks from which each rank samples its part of a batch; batch_size is that of all ranks together.

    All ranks must pass generators in the same state. chunks[k] is still all of D_k.

    Args:
        chunks: the same chunks on all ranks.
        group: the process group of the ranks; all ranks if None.

    Raises:
        ValueError: in sampling, if batch_size is not a multiple of the number of ranks.

    Example:
        >>> import torch, partnets
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> chunks = share(partnets.chunk((torch.arange(10),), (0.8, 0.2)))
        >>> (x,) = chunks.sample(1, batch_size=4, generator=Generator().manual_seed(0))
        >>> len(x)  # the only rank has the whole batch
        4
        >>> dist.destroy_process_group()
    """
    return SharedChunks(chunks, group)
