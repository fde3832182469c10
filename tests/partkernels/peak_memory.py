"""Prints by how many bytes the peak of resident memory rises in forward and backward of a layer. Linux only.

usage: python peak_memory.py dense|partitioned SIZE BATCH
"""

import gc
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import partkernels as pk


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def main(kind: str, size: int, batch: int) -> None:
    def step(size: int, batch: int) -> int:
        x = torch.randn(batch, size, requires_grad=True)
        weight = torch.randn(size, size, requires_grad=True)
        defaults = pk.Uniform(0.1, seed=0)
        partition = pk.Partition.random((size, size), (0.8, 0.1, 0.1), seed=0, defaults=defaults)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        y = F.linear(x, weight) if kind == "dense" else pk.linear(x, weight, partition, 2, update=2)
        y.sum().backward()
        return resident("VmHWM") - before + (partition.map.nbytes if kind == "partitioned" else 0)

    step(64, batch)  # libraries take their own memory at their first call
    print(step(size, batch))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
