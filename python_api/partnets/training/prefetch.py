"""Prefetch: a source of a training's batches that fetches them in advance, by a DataLoader."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torch import Generator

from partnets.data.chunks import Chunks
from partnets.data.fetching import Request, request

# A function of a generator that yields the coming draws: the name of a method of Chunks, k and the batch size.
Plan = Callable[[Generator], Iterator[tuple[str, int, int]]]


class Prefetch:
    """sample and sample_upto of chunks, with batches that a DataLoader has fetched in advance.

    A copy of the generator makes the coming draws in advance. At its step, each draw is repeated, and its batch is
    ready. So the generator's state does not depend on prefetching, and checkpoints need not store it. If other code
    draws from the generator, the prefetched batches are wrong, and further batches are fetched when needed.

    Args:
        chunks: the chunks to draw from.
        loading: options of a DataLoader.

    Raises:
        ValueError: the chunks override sample or sample_upto.
    """

    def __init__(self, chunks: Chunks, loading: Mapping[str, Any]) -> None:
        kind = type(chunks)
        if kind.sample is not Chunks.sample or kind.sample_upto is not Chunks.sample_upto:
            raise ValueError(
                f"{kind.__name__} overrides sample or sample_upto, so its batches cannot be fetched ahead; leave"
                f" {', '.join(loading)} out."
            )
        self.chunks, self.loading = chunks, loading
        self._expected: deque[Request] = deque()
        self._batches: Iterator | None = None

    def sample(self, k: int, batch_size: int, generator: Generator) -> Any:
        """Sample a batch as Chunks does."""
        return self._take(self._draw("sample", k, batch_size, generator))

    def sample_upto(self, k: int, batch_size: int, generator: Generator) -> Any:
        """Sample a batch as Chunks does."""
        return self._take(self._draw("sample_upto", k, batch_size, generator))

    @contextmanager
    def fetching(self, plan: Plan, generator: Generator) -> Iterator[None]:
        """Fetch batches in advance in the context; end all worker processes on exit."""
        self._expected.clear()
        with closing(self.chunks.fetched(self._requests(plan, generator.clone_state()), self.loading)) as self._batches:
            try:
                yield
            finally:
                self._batches = None

    def _draw(self, kind: str, k: int, batch_size: int, generator: Generator) -> Request:
        draw = self.chunks.draw if kind == "sample" else self.chunks.draw_upto
        return request(draw(k, batch_size, generator), generator)

    def _requests(self, plan: Plan, generator: Generator) -> Iterator[Request]:
        for kind, k, batch_size in plan(generator):
            self._expected.append(self._draw(kind, k, batch_size, generator))
            yield self._expected[-1]

    def _take(self, wanted: Request) -> Any:
        if self._batches is not None:
            batch = next(self._batches, None)
            if self._expected and self._expected.popleft().seed == wanted.seed:
                return batch
            self._batches.close()
            self._batches = None
            warnings.warn(
                "the batches that were fetched ahead are not those of this step, because something else has drawn from"
                " the trainer's generator or loaded a checkpoint; until fit ends, batches are fetched when needed,"
                " without worker processes.",
                stacklevel=2,
            )
        return self.chunks.fetch_as_asked(wanted, self.loading)
