"""Batches of examples by their indices: fetched in this process, or prefetched by a DataLoader's workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from partnets.data.examples import Collate, below_subsets, collated
from partnets.utils import random_state
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived

# DataLoader options for how batches are fetched; all others are about their content.
OPTIONS = (
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "pin_memory_device",
)
_DRAWN = "batches are drawn from the chunks at random, as the method needs them"
_FIT = "pass steps to fit(steps)"
_OPTIMIZER = "pass optimizer=partnets.optim.AdamW(model, lr=..., weight_decay=...)"
_LOSS = "pass it as loss="
# Arguments of DataLoaders and of other libraries' trainers, and their equivalents here.
REFUSED = {
    **dict.fromkeys(("dataset", "sampler", "batch_sampler", "shuffle", "drop_last", "generator", "in_order"), _DRAWN),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), _OPTIMIZER),
    **dict.fromkeys(("steps", "max_steps", "epochs"), _FIT),
    **dict.fromkeys(("criterion", "loss_fn"), _LOSS),
    "collate_fn": "pass collate= to partnets.chunk, or to the evaluation",
    "device": "move the model: model.to(device)",
}
CPU = torch.device("cpu")


class Request(NamedTuple):
    """A request for a batch.

    Attributes:
        places: indices of the examples in the dataset.
        seed: seed of a worker process for random transforms of the examples.
    """

    places: Tensor
    seed: int


def request(places: Tensor, generator: Generator) -> Request:
    """Return the request for indices just drawn with a generator; its seed depends on its state and the indices."""
    found = hashlib.blake2b(generator.get_state().numpy(), digest_size=8)
    found.update(places.contiguous().numpy())
    return Request(places, int.from_bytes(found.digest(), "little") & ((1 << 63) - 1))


def check_options(loading: Mapping[str, Any], who: str, also: Iterable[str] = ()) -> dict[str, Any]:
    """Return the DataLoader options, or an empty dict if they do not change how batches are fetched.

    Args:
        who: the function that received the options, for error messages.
        also: allowed options besides OPTIONS.

    Raises:
        TypeError: an option is not allowed.
        ValueError: the DataLoader rejects them.
    """
    for name in loading.keys() - {*OPTIONS, *also}:
        if name in REFUSED:
            raise TypeError(f"{who} takes no {name}: {REFUSED[name]}.")
        known = ", ".join((*OPTIONS, *also))
        raise TypeError(f"{who} has no option {name!r}; of a DataLoader's options it takes {known}.")
    check_at_least(0, num_workers=loading.get("num_workers", 0))
    if loading:
        DataLoader([], **loading)  # checks their combination
    return dict(loading) if loading.get("num_workers") or loading.get("pin_memory") else {}


class Batches(Dataset[Any]):
    """A dataset with one batch for each request, the same in every process, by a DataLoader's options."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, loading: Mapping[str, Any]) -> None:
        self.dataset, self.collate, self.seeded = dataset, collate, bool(loading.get("num_workers"))

    def __getitem__(self, wanted: tuple[list[int], int]) -> Any:
        places, seed = torch.tensor(wanted[0], device="cpu"), wanted[1]
        if not self.seeded:
            return collated(self.dataset, places, self.collate)
        with random_state.preserved(CPU):
            random_state.seed(seed)
            return collated(self.dataset, places, self.collate)


def fetched(
    dataset: Dataset[Any], collate: Collate, requests: Iterable[Request], loading: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the batches of these requests, in order, by a DataLoader. Close it to end its processes.

    With worker processes, requests are consumed ahead of the yielded batches.
    """
    loader = DataLoader(
        Batches(dataset, collate, loading),
        batch_size=None,
        sampler=((each.places.tolist(), each.seed) for each in requests),
        collate_fn=_as_it_is,
        generator=Generator(),  # without one it would consume a number of torch's global generator
        **loading,
    )
    with torch.device("cpu"):  # the DataLoader draws its seed on the default device
        iterator = iter(loader)
    try:
        yield from iterator
    finally:
        # Otherwise the workers would live as long as any traceback that references them.
        getattr(iterator, "_shutdown_workers", bool)()


def _as_it_is(batch: Any) -> Any:
    return batch


def batches(
    dataset: Dataset[Any],
    batch_size: int,
    indices: Tensor | None = None,
    collate: Collate = default_collate,
    loading: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield the examples at these indices, or all, in batches and in order; the last batch may be smaller.

    Random numbers in worker processes depend only on torch.initial_seed(), and are the same in each call.
    """
    check_at_least(1, batch_size=batch_size)
    indices = torch.arange(len(dataset), device="cpu") if indices is None else indices
    dataset, indices = below_subsets(dataset, indices)
    parts = (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))
    if not loading:
        return (collated(dataset, part, collate) for part in parts)
    seed = torch.initial_seed()
    requests = (Request(part, derived(seed, f"batch {n}")) for n, part in enumerate(parts))
    return fetched(dataset, collate, requests, loading)
