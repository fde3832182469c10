"""Several ranks: what a training step sends, and how its speed grows from one process to two (weak scaling).

python -m partbench.ranks
python -m partbench.ranks --memory

Each process has one thread and its own batch, and talks to the other by gloo. The peers are torch's
DistributedDataParallel and FSDP2 of the dense model, and those of partnets of the partitioned one. With --memory: the
peak memory of a process while it makes and trains its half of a model of GPT-2-medium's size.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import partnets
import partnets.distributed
from partbench.figures import markdown
from partbench.measuring.peak import TUNABLES
from partbench.models.transformer import TransformerLM

PROPORTIONS = (0.8, 0.1, 0.1)
BATCH, TOKENS, VOCABULARY, WIDTH = 8, 64, 2000, 256
STEPS, ROUNDS = 3, 9
# GPT-2 medium's size, 406 million weights with a head that is not tied, and the ways to make it on two ranks.
LARGE = {"vocabulary": 50257, "context": 1024, "width": 1024, "depth": 24, "heads": 16}
WAYS = ("dense, from the meta device", "partitioned, then sharded", "partitioned, from the meta device")
PEERS = ("dense, DDP", "partitioned, DDP", "dense, FSDP2", "partitioned, FSDP2")
# Collectives that FSDP2 calls, before PyTorch 2.13 by the first two names.
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single")
MIB = 2**20


class Peer:
    """A model on this rank with its steps.

    Attributes:
        bytes: what this rank has sent of gradients and weights: all of what an all-reduce of two ranks gets.
    """

    def __init__(self, name: str, ranks: int) -> None:
        torch.manual_seed(0)
        self.model, self.bytes = TransformerLM(VOCABULARY, TOKENS, WIDTH, depth=4, heads=4), 0
        self.is_partitioned, self.is_sharded = name.startswith("partitioned"), name.endswith("FSDP2")
        if self.is_partitioned:
            partnets.partition(self.model, PROPORTIONS, seed=0)
        self.call: Callable[[Tensor], Tensor] = self.model
        if ranks > 1:
            self._distribute()
        kind = partnets.optim.Adam if self.is_partitioned else torch.optim.Adam
        self.optimizer = kind(self.model if self.is_partitioned else self.model.parameters())

    def _distribute(self) -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        units = [*self.model.blocks, self.model.tokens, self.model.positions, self.model.head, self.model]
        if self.is_sharded and self.is_partitioned:
            partnets.distributed.fully_shard(self.model, units, mesh=mesh)
        elif self.is_sharded:
            for unit in units:
                fsdp.fully_shard(unit, mesh=mesh)
        elif self.is_partitioned:
            self.call = partnets.distributed.DDP(self.model)
        else:
            self.call = nn.parallel.DistributedDataParallel(self.model)
            self.call.register_comm_hook(None, lambda _, bucket: self._counted(bucket))  # which compares annotations

    def _counted(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(None, bucket)

    def step(self, k: int, x: Tensor) -> None:
        self.optimizer.zero_grad()
        if self.is_partitioned:
            with partnets.weights_learning(self.model, k):
                self._loss(x).backward()
            self.optimizer.step(update=k)
        else:
            self._loss(x).backward()
            self.optimizer.step()

    def _loss(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.call(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def sent(self, k: int, x: Tensor) -> int:
        """Return the bytes of a step."""
        packing = getattr(self.call, "packing", None)
        before = self.bytes + (packing.bytes if packing else 0)
        with _counting(self):
            self.step(k, x)
        return self.bytes + (packing.bytes if packing else 0) - before


@contextmanager
def _counting(peer: Peer) -> Iterator[None]:
    """Count the bytes of FSDP2's collectives: half of the larger tensor with two ranks, as each has the other half."""
    held = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counted(name: str, *given: Any, **named: Any) -> Any:
        peer.bytes += max(one.nbytes for one in (*given, *named.values()) if isinstance(one, Tensor)) // 2
        return held[name](*given, **named)

    for name in held:
        setattr(dist, name, partial(counted, name))
    try:
        yield
    finally:
        for name, function in held.items():
            setattr(dist, name, function)


def measured(rank: int, ranks: int, store: str, answers: Any) -> None:
    """Put the bytes and the seconds of each peer's steps into a queue; on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    x = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(rank))
    peers = {name: Peer(name, ranks) for name in PEERS}
    found = {}
    for name, peer in peers.items():
        numbers = range(1, len(PROPORTIONS) + 1) if peer.is_partitioned else [1]
        found[name] = {"bytes": [peer.sent(k, x) for k in numbers], "seconds": []}
    for _ in range(ROUNDS):
        for name, peer in peers.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                peer.step(1, x)
            found[name]["seconds"].append((time.perf_counter() - start) / STEPS)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def run(ranks: int, store: str) -> dict[str, dict[str, list[float]]]:
    """Return the bytes and seconds of each peer's steps on so many processes."""
    answers = processes.get_context("spawn").SimpleQueue()
    processes.spawn(measured, (ranks, store, answers), nprocs=ranks)
    return answers.get()


def halved(way: str) -> nn.Module:
    """Make a large model of which this rank has half."""
    device, mesh = "cpu" if way.endswith("then sharded") else "meta", dist.init_device_mesh("cpu", (2,))
    is_partitioned = way.startswith("partitioned")
    with torch.device(device):
        model = TransformerLM(**LARGE)
        if is_partitioned:
            partnets.partition(model, PROPORTIONS, seed=0)
    units = [*model.blocks, model.tokens, model.positions, model.norm, model.head, model]
    if is_partitioned:
        return partnets.distributed.fully_shard(model, units, initialise=device == "meta", mesh=mesh)
    for unit in units:
        if unit is not model:
            unit.to_empty(device="cpu")
            for module in unit.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        fsdp.fully_shard(unit, mesh=mesh)
    return model


def peaks(rank: int, way: str, store: str, answers: Any) -> None:
    """Put the peak memory after the model is made, and after a training step, into a queue; on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    found = [_peak()]
    model, is_partitioned = halved(way), way.startswith("partitioned")
    found.append(_peak())
    optimizer = partnets.optim.Adam(model) if is_partitioned else torch.optim.Adam(model.parameters())
    with partnets.weights_learning(model, 1) if is_partitioned else nullcontext():
        model(x).logsumexp(-1).mean().backward()
    optimizer.step(**{"update": 1} if is_partitioned else {})
    found.append(_peak())
    if rank == 0:
        answers.put([after - found[0] for after in found[1:]])
    dist.destroy_process_group()


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(folder: str) -> str:
    """Return a table of peaks in MiB, beyond the libraries' memory."""
    rows = []
    for i, way in enumerate(WAYS):
        answers = processes.get_context("spawn").SimpleQueue()
        with patch.dict(os.environ, GLIBC_TUNABLES=TUNABLES):
            processes.spawn(peaks, (way, f"{folder}/{i}", answers), nprocs=2)
        rows.append([way, *(f"{size / MIB:.0f}" for size in answers.get())])
    return markdown(["model of 406 M weights, half on each rank", "made: MiB", "after a step of Adam: MiB"], rows)


def table(one: dict[str, Any], two: dict[str, Any]) -> str:
    """Return a table of the mean bytes, and of the seconds over those of one process."""
    rows = []
    for name in PEERS:
        sizes = two[name]["bytes"]
        by_share = sum(share * size for share, size in zip(PROPORTIONS, sizes, strict=True)) if sizes[1:] else sizes[0]
        each = ", ".join(f"{size / MIB:.2f}" for size in sizes)
        ratios = [b / a for a, b in zip(one[name]["seconds"], two[name]["seconds"], strict=True)]
        alone, both = (f"{1e3 * median(found[name]['seconds']):.0f}" for found in (one, two))
        rows.append(
            [name, each, f"{mean(sizes) / MIB:.2f}", f"{by_share / MIB:.2f}", alone, both, f"{median(ratios):.2f}"]
        )
    head = ["peer", "MiB of a step, k = 1, 2, 3", "k uniform", "k ~ Cat(u)", "ms, one process", "ms, two", "ratio"]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a large model's halves")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(memory(folder) if chosen.memory else table(*(run(ranks, f"{folder}/{ranks}") for ranks in (1, 2))))


if __name__ == "__main__":
    main()
