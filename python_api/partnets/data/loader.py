"""Loader: the batches of a training on chunks, for loops that take a DataLoader."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from partkernels.arguments import check_seed
from partnets.data.chunks import Chunks, check_chunks, check_unseen, draw_k
from partnets.data.examples import Collate
from partnets.data.fetching import check_options
from partnets.data.parts import Parts
from partnets.utils import random_state
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived


class Draw(NamedTuple):
    """The batches of one training step: of w_k, and of ψ unless hyper_k is None.

    Attributes:
        k, batch: a batch of D_1:k, for partition k of subnetwork k.
        hyper_k, hyper_batch: a batch of D_hyper_k, for the hyperparameters in subnetwork hyper_k - 1. With lookahead,
            a pair of this batch and a list of batches of D_1:hyper_k-1, as in partnets.step_lookahead.
    """

    k: int
    batch: Any
    hyper_k: int | None
    hyper_batch: Any


class Loader(DataLoader[Draw]):
    """A DataLoader of Draws, for other training loops: Lightning's, Hugging Face's, or a custom one.

    Batches are drawn as in partnets.Trainer (Appendix I.1): with replacement, k in proportion to the chunks. Draw n
    depends only on the seed and n, not on earlier draws or the number of worker processes. An epoch is `steps` draws,
    not a pass over the data; an iteration yields the rest of the current epoch, and the next one continues with new
    draws. After an interruption, load_state_dict or set_epoch continues in the same way.

    All ranks of a distributed training have the same draws. Pass partnets.distributed.share(chunks) to give each rank
    its part of each batch; batch sizes are those of all ranks together. PartitionedModule of Lightning does so.

    Args:
        chunks: D_1..D_C.
        batch_size: examples in a step of w.
        steps: the draws of an epoch, len(loader).
        hyper_batch_size: examples in a step of ψ; None for steps of w only.
        steps_ahead: the number of steps of w in a lookahead of ψ (partnets.Lookahead); each has a batch of batch_size.
        accumulate: the number of equal parts of each batch. If it is above 1, a batch is a list of them, and
            partnets.step_weights and step_hyper accumulate their gradients, which takes the memory of one part.
        seed: an int in [0, 2**63).
        collate_fn: makes each of the two batches of a list of its examples; the chunks' collate if None.
        **options: of torch's DataLoader, such as num_workers, pin_memory and persistent_workers.

    Attributes:
        chunks, hyper_batch_size, steps_ahead: as given.

    Raises:
        ValueError: a number is out of range, there is no chunk for ψ to learn from, or a batch size is not a multiple
            of accumulate.
        TypeError: an option selects the examples of a batch, such as sampler or shuffle.

    Example:
        >>> import partnets, torch
        >>> chunks = partnets.chunk((torch.randn(20, 4), torch.arange(20)), (0.8, 0.2))
        >>> for k, (x, y), hyper_k, (hyper_x, hyper_y) in Loader(chunks, 8, steps=2, hyper_batch_size=6):
        ...     print(x.shape, hyper_k, hyper_x.shape)
        torch.Size([8, 4]) 2 torch.Size([6, 4])
        torch.Size([8, 4]) 2 torch.Size([6, 4])
    """

    def __init__(
        self,
        chunks: Chunks,
        batch_size: int,
        *,
        steps: int,
        hyper_batch_size: int | None = None,
        steps_ahead: int = 0,
        accumulate: int = 1,
        seed: int = 0,
        collate_fn: Collate | None = None,
        **options: Any,
    ) -> None:
        check_chunks(chunks)
        check_at_least(1, batch_size=batch_size, steps=steps, accumulate=accumulate)
        check_at_least(0, steps_ahead=steps_ahead)
        check_options(options, "Loader", also=["persistent_workers"])
        if hyper_batch_size is not None:
            check_at_least(1, hyper_batch_size=hyper_batch_size)
            check_unseen(chunks)
        elif steps_ahead:
            raise ValueError(f"steps_ahead={steps_ahead} needs steps of ψ; pass hyper_batch_size.")
        for name, size in {"batch_size": batch_size, "hyper_batch_size": hyper_batch_size or 0}.items():
            if size % accumulate:
                raise ValueError(f"{name}={size} has no {accumulate} equal parts; pass a multiple of accumulate.")
        check_seed("seed", seed)
        if collate_fn is not None:
            chunks = copy.copy(chunks)
            chunks.collate = collate_fn
        draws = _Draws(chunks, batch_size, hyper_batch_size, steps_ahead, accumulate, seed)
        # A draw is a batch of size one, because loops that resume skip whole batches. Without its generator, each
        # iteration would consume a number of torch's global one and change the model's noise.
        one = {
            "batch_size": 1,
            "collate_fn": operator.itemgetter(0),
            "generator": Generator().manual_seed(derived(seed, "workers")),
        }
        self.chunks, self.hyper_batch_size, self.steps_ahead = chunks, hyper_batch_size, steps_ahead
        super().__init__(draws, sampler=_Numbers(steps), **one, **options)

    def __iter__(self) -> Iterator[Draw]:
        with torch.device("cpu"):  # the DataLoader draws its seed on the default device
            draws = super().__iter__()
        for draw in draws:
            self.sampler.done += 1
            yield draw

    def set_epoch(self, epoch: int) -> None:
        """Continue with the draws of an epoch, as loops do that skip batches instead of loading a state_dict."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws so far and the identity of their source."""
        return {"done": self.sampler.done, "of": self.dataset.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved number of draws.

        Raises:
            ValueError: the draws came from other chunks, another seed or other batch sizes.
        """
        own = self.dataset.identity()
        saved = state["of"]
        if different := [name for name, value in own.items() if saved.get(name) != value]:
            told = ", ".join(f"{name} {saved.get(name)!r} (here {own[name]!r})" for name in different)
            raise ValueError(
                f"these draws were of {told}: partitions would learn from later chunks, or twice from some examples."
                " Make chunks and Loader as they were, with the same data in the same order."
            )
        self.sampler.done = state["done"]


@dataclass(eq=False)
class _Draws(Dataset[Draw]):
    """A dataset with draw n at index n."""

    chunks: Chunks
    batch_size: int
    hyper_batch_size: int | None
    steps_ahead: int
    accumulate: int
    seed: int
    # Whether each part of a batch is an item of the dataset.
    has_parts_as_items: bool = False

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the draws."""
        names = "seed", "batch_size", "hyper_batch_size", "accumulate"
        return {"chunks": self.chunks.fingerprint, **{name: getattr(self, name) for name in names}}

    def __getitem__(self, item: int) -> Draw:
        if get_worker_info() is not None:  # otherwise random transforms would depend on the worker
            random_state.seed(derived(self.seed, f"examples of {item}"))
        n, part = divmod(item, self.accumulate) if self.has_parts_as_items else (item, None)
        generator = Generator().manual_seed(derived(self.seed, str(n)))
        u, chunks = self.chunks.proportions, self.chunks
        k = draw_k(u, generator)
        drawn = chunks.draw_upto(k, self.batch_size, generator)
        batch = self._fetched(drawn) if part is None else chunks.fetch(drawn.chunk(self.accumulate)[part])
        if self.hyper_batch_size is None or part:  # the first part comes with the batch of ψ
            return Draw(k, batch, None, None)
        hyper_k = draw_k(u, generator, start=2)
        unseen = self._fetched(chunks.draw(hyper_k, self.hyper_batch_size, generator))
        if not self.steps_ahead:
            return Draw(k, batch, hyper_k, unseen)
        size = self.batch_size
        seen = [self._fetched(chunks.draw_upto(hyper_k - 1, size, generator)) for _ in range(self.steps_ahead)]
        return Draw(k, batch, hyper_k, (unseen, seen))

    def _fetched(self, drawn: Tensor) -> Any:
        """Return a batch, in parts if gradients accumulate."""
        if self.accumulate == 1:
            return self.chunks.fetch(drawn)
        return Parts(self.chunks.fetch(part) for part in drawn.chunk(self.accumulate))


class _Numbers(DistributedSampler):
    """A sampler of the draws that are left of the current epoch, the same on all ranks.

    Lightning replaces samplers of other classes by one that gives each rank other draws.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.done, (self.done // self.steps + 1) * self.steps))

    def set_epoch(self, epoch: int) -> None:
        """Continue with the draws of an epoch; see Loader.set_epoch, and accelerate, which calls this."""
        if epoch != self.done // self.steps:
            self.done = epoch * self.steps
