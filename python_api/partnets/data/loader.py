"""Loader: the batches that a training draws from chunks, for loops that take a DataLoader."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from partkernels.arguments import check_seed
from partnets.data.chunks import Chunks, check_chunks, check_unseen, draw_k
from partnets.data.examples import Collate
from partnets.data.fetching import check_options
from partnets.utils import random_state
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived


class Draw(NamedTuple):
    """The batches of a step: of w_k, and of ψ unless hyper_k is None.

    Attributes:
        k, batch: a batch of D_1:k, for partition k of subnetwork k.
        hyper_k, hyper_batch: a batch of D_hyper_k, for the hyperparameters in subnetwork hyper_k - 1. For steps of ψ
            that look ahead a pair of it and of a list of batches of D_1:hyper_k-1, as partnets.step_lookahead takes it.
    """

    k: int
    batch: Any
    hyper_k: int | None
    hyper_batch: Any


class Loader(DataLoader):
    """A DataLoader of Draws, for training loops of others: Lightning's, Hugging Face's, or one of your own.

    Batches are drawn as partnets.Trainer draws them (Appendix I.1): with replacement, k from the chunks' proportions.
    Draw n is a function of the seed and n alone, whatever was drawn before it and by however many worker processes. An
    epoch is so many steps, no pass over the data: an iteration gives what is left of the present one, and the next one
    goes on with other draws. With its state_dict, or the sampler's set_epoch, an interrupted training does so too.

    For training in one process: those of a distributed one would all have the same draws.

    Args:
        chunks: D_1..D_C.
        batch_size: examples in a step of w.
        steps: the draws of an epoch, len(loader).
        hyper_batch_size: examples in a step of ψ; None for steps of w alone.
        steps_ahead: how many steps of w a step of ψ looks ahead (partnets.Lookahead); each has a batch of batch_size.
        seed: an int in [0, 2**63).
        collate_fn: makes each of the two batches of a list of its examples; the chunks' collate if None.
        **options: of torch's DataLoader, such as num_workers, pin_memory and persistent_workers.

    Attributes:
        chunks, hyper_batch_size, steps_ahead: as they were given.

    Raises:
        ValueError: a number is out of range, or there is no chunk for ψ to learn from.
        TypeError: an option says which examples a batch has, as sampler and shuffle do.

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
        seed: int = 0,
        collate_fn: Collate | None = None,
        **options,
    ) -> None:
        check_chunks(chunks)
        check_at_least(1, batch_size=batch_size, steps=steps)
        check_at_least(0, steps_ahead=steps_ahead)
        check_options(options, "Loader", also=["persistent_workers"])
        if hyper_batch_size is not None:
            check_at_least(1, hyper_batch_size=hyper_batch_size)
            check_unseen(chunks)
        elif steps_ahead:
            raise ValueError(f"steps_ahead={steps_ahead} are of ψ's steps, and there are none; pass hyper_batch_size.")
        check_seed("seed", seed)
        if collate_fn is not None:
            chunks = copy.copy(chunks)
            chunks.collate = collate_fn
        draws = _Draws(chunks, batch_size, hyper_batch_size, steps_ahead, seed)
        # A draw is a batch of one, as loops that resume skip whole batches; and without a generator of its own, an
        # iteration would take a number from torch's global one, which the model's noise comes from.
        one = {
            "batch_size": 1,
            "collate_fn": operator.itemgetter(0),
            "generator": Generator().manual_seed(derived(seed, "workers")),
        }
        self.chunks, self.hyper_batch_size, self.steps_ahead = chunks, hyper_batch_size, steps_ahead
        super().__init__(draws, sampler=_Numbers(steps), **one, **options)

    def __iter__(self) -> Iterator[Draw]:
        with torch.device("cpu"):  # where a DataLoader draws its seed
            draws = super().__iter__()
        for draw in draws:
            self.sampler.done += 1
            yield draw

    def state_dict(self) -> dict[str, Any]:
        """How many draws have been given, and of what."""
        return {"done": self.sampler.done, "of": self.dataset.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after so many draws.

        Raises:
            ValueError: they were draws of other chunks, of another seed or of other batch sizes.
        """
        own = self.dataset.identity()
        saved = state.get("of", own)  # older states have none
        if different := [name for name, value in own.items() if saved.get(name) != value]:
            told = ", ".join(f"{name} {saved.get(name)!r} (here {own[name]!r})" for name in different)
            raise ValueError(
                f"these draws were of {told}: partitions would learn from what are later chunks here, or from the same"
                " examples twice. Make chunks and Loader as they were, from the same data in the same order."
            )
        self.sampler.done = state["done"]


class _Draws(Dataset):
    """Draw n, for each n."""

    def __init__(
        self, chunks: Chunks, batch_size: int, hyper_batch_size: int | None, steps_ahead: int, seed: int
    ) -> None:
        self.chunks, self.batch_size, self.hyper_batch_size, self.seed = chunks, batch_size, hyper_batch_size, seed
        self.steps_ahead = steps_ahead

    def identity(self) -> dict[str, Any]:
        """What decides the draws."""
        sizes = {"batch_size": self.batch_size, "hyper_batch_size": self.hyper_batch_size}
        return {"chunks": self.chunks.fingerprint, "seed": self.seed, **sizes}

    def __getitem__(self, n: int) -> Draw:
        if get_worker_info() is not None:  # otherwise what is random about the examples would depend on the worker
            random_state.seed(derived(self.seed, f"examples of {n}"))
        generator = Generator().manual_seed(derived(self.seed, str(n)))
        u = self.chunks.proportions
        k = draw_k(u, generator)
        batch = self.chunks.sample_upto(k, self.batch_size, generator)
        if self.hyper_batch_size is None:
            return Draw(k, batch, None, None)
        hyper_k = draw_k(u, generator, start=2)
        unseen = self.chunks.sample(hyper_k, self.hyper_batch_size, generator)
        if not self.steps_ahead:
            return Draw(k, batch, hyper_k, unseen)
        seen = [self.chunks.sample_upto(hyper_k - 1, self.batch_size, generator) for _ in range(self.steps_ahead)]
        return Draw(k, batch, hyper_k, (unseen, seen))


class _Numbers(Sampler):
    """The numbers of the draws that are left of the present epoch."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.done, (self.done // self.steps + 1) * self.steps))

    def set_epoch(self, epoch: int) -> None:
        """As of torch's DistributedSampler, for loops that keep no state_dict of a loader."""
        if epoch != self.done // self.steps:
            self.done = epoch * self.steps
