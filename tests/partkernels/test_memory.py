"""No extra copy of a weight: peak memory against the dense layer's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20


def peak(kind: str, size: int, batch: int) -> int:
    script = Path(__file__).with_name("peak_memory.py")
    done = subprocess.run([sys.executable, script, kind, str(size), str(batch)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="peak resident memory is read from /proc, which Linux has")
def test_forward_and_backward_take_what_the_dense_layer_takes_plus_the_map_and_4_mib():
    size, batch = 4096, 64
    dense, partitioned = (peak(kind, size, batch) for kind in ("dense", "partitioned"))
    assert dense > size * size * 4, "the dense weight gradient alone is that large: the measurement works"
    assert partitioned <= dense + size * size // 4 + 4 * MIB
