"""Peak memory of a training step: by PyTorch's allocator, and of a separate process.

The allocator counts tensors to the byte, but not the memory that libraries and kernels allocate. A process's resident
memory includes this, in pages. On a GPU, the allocator includes both.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import partkernels as pk
from partbench.peers import models
from partbench.peers.layer import THREE, Partitioning
from partbench.peers.schemes import nested, partitioned
from partbench.peers.train_step import TrainStep, seeded

# With its default thresholds, glibc keeps freed memory, and the resident size shows earlier allocations.
TUNABLES = "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=65536"


@dataclass(frozen=True)
class Job:
    """The training step to measure: a model of partbench.peers.models under a scheme, on a backend of ours."""

    model: str
    scheme: str = "dense"
    backend: str = "auto"
    batch: int = 32
    partitioning: Partitioning = THREE
    active: int = 2
    optimizer: str = ""
    input: tuple[int, ...] | None = None
    classes: int | None = None
    device: str = "cpu"
    threads: int = 1

    def found(self) -> models.Model:
        return models.find(self.model, self.input, self.classes)

    def make(self, seed: int = 0) -> TrainStep:
        """Return the step, after a first call that creates the optimiser's state.

        Raises:
            Missing: the scheme can partition no layer of this model.
        """
        found = self.found()
        with seeded(seed):
            model = found.make().to(self.device)
            x, y = (tensor.to(self.device) for tensor in found.examples(self.batch))
            if x.is_floating_point():
                x = x.to(next(model.parameters()).dtype)
            is_nested = self.scheme == "nested"
            model = (
                nested(model, self.partitioning, x[:2]) if is_nested else partitioned(model, self.partitioning, seed)
            )
        scheme = "partkernels" if is_nested else self.scheme
        step = TrainStep(scheme, model, x, y, self.active, self.active, self.optimizer or found.optimizer)
        step()
        return step

    def using(self) -> AbstractContextManager:
        """Select the backend within the block."""
        return pk.use_backend(self.backend)

    def small(self) -> Job:
        """Return this job with a small model, to run before a measurement.

        Libraries then have allocated the memory that they keep, and the measurement does not count it.
        """
        return dataclasses.replace(self, model="mnist-cnn", batch=2, optimizer=self.optimizer or self.found().optimizer)


def by_allocator(job: Job) -> int:
    """Return the peak bytes of tensors in a step, including those that the step keeps."""
    with job.using():
        if job.device != "cpu":
            return _by_cuda_allocator(job)
        step = job.make()
        return _kept(step) + of_tensors(step)


def of_tensors(call: Callable[[], object]) -> int:
    """Return the peak bytes of CPU tensors that a call allocates, beyond those that exist before it.

    It is called twice, so that tensors that it makes once and keeps do not count.
    """
    call()
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def _kept(step: TrainStep) -> int:
    """Return the bytes of all tensors that a step keeps between calls."""
    tensors = [step.x, step.y, *step.model.buffers(), *(t for some in step.kept().values() for t in some)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _by_cuda_allocator(job: Job) -> int:
    # cuBLAS takes its workspace, some 32 MiB for each calling thread, from the same allocator.
    dataclasses.replace(job.small(), scheme="dense").make()
    gc.collect()
    before = torch.cuda.memory_allocated()
    step = job.make()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def by_process(job: Job) -> int:
    """Return the peak resident bytes of a new process in a step, beyond those before it makes the model.

    Raises:
        RuntimeError: the process failed; the message contains its error.
    """
    try:
        with patch.dict(os.environ, GLIBC_TUNABLES=TUNABLES), ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_in_this_process, job).result()
    except Exception as error:
        raise RuntimeError(f"measuring {job} failed: {error}") from error


def _in_this_process(job: Job) -> int:
    torch.set_num_threads(job.threads)
    with job.using():
        job.small().make()()
        _trim()
        before = _resident("VmRSS")
        step = job.make()
        _trim()
        return _peak_of(step) - before


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, the current size, or VmHWM, the peak since it was reset."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def _peak_of(function: Callable[[], object]) -> int:
    """Return the peak resident bytes while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return _resident("VmHWM")


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
