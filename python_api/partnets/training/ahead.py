"""Ahead: the chunks of a training, whose batches are fetched before their steps come."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torch import Generator

from partnets.data.chunks import Chunks
from partnets.data.fetching import Request, request

# What will be drawn with a generator: the name of a method of Chunks, k and the batch size.
Plan = Callable[[Generator], Iterator[tuple[str, int, int]]]


class Ahead:
    """sample and sample_upto of chunks, by a DataLoader.

    What will be drawn is drawn before by a copy of the generator; when its step comes it is drawn again, and the batch
    is there. So the generator is that of the steps done, whatever was fetched ahead, and a checkpoint knows nothing of
    this. If somebody else draws as well, the batches are not those that are wanted, which are then fetched when needed.

    Args:
        chunks: whose batches are those of its draws.
        loading: a DataLoader's options.

    Raises:
        ValueError: the chunks make batches in a way of their own.
    """

    def __init__(self, chunks: Chunks, loading: Mapping[str, Any]) -> None:
        kind = type(chunks)
        if kind.sample is not Chunks.sample or kind.sample_upto is not Chunks.sample_upto:
            raise ValueError(
                f"{kind.__name__} makes batches in sample or sample_upto of its own, which are not fetched ahead; leave"
                f" {', '.join(loading)} out."
            )
        self.chunks, self.loading = chunks, loading
        self._expected: deque[Request] = deque()
        self._batches: Iterator | None = None

    def sample(self, k: int, batch_size: int, generator: Generator) -> Any:
        """As of Chunks."""
        return self._taken(request(self.chunks.draw(k, batch_size, generator), generator))

    def sample_upto(self, k: int, batch_size: int, generator: Generator) -> Any:
        """As of Chunks."""
        return self._taken(request(self.chunks.draw_upto(k, batch_size, generator), generator))

    @contextmanager
    def fetching(self, plan: Plan, generator: Generator) -> Iterator[None]:
        """Inside, batches are fetched ahead; afterwards there is no worker process any more."""
        copy = generator.clone_state()
        self._expected.clear()
        with closing(self.chunks.fetched(self._requests(plan, copy), self.loading)) as self._batches:
            try:
                yield
            finally:
                self._batches = None

    def _requests(self, plan: Plan, generator: Generator) -> Iterator[Request]:
        for draw, k, batch_size in plan(generator):
            wanted = request(getattr(self.chunks, draw)(k, batch_size, generator), generator)
            self._expected.append(wanted)
            yield wanted

    def _taken(self, wanted: Request) -> Any:
        if self._batches is not None:
            batch = next(self._batches, None)
            if self._expected and self._expected.popleft().seed == wanted.seed:
                return batch
            self._batches.close()
            self._batches = None
            warnings.warn(
                "the batches that were fetched ahead are not those of this step, since something else has drawn from"
                " the trainer's generator or loaded a checkpoint: until fit ends, batches are fetched as they are"
                " needed, without worker processes.",
                stacklevel=2,
            )
        return self.chunks.fetch_as_asked(wanted, self.loading)
