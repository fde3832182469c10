"""Training on a file that is larger than the memory that the process may allocate."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import sys

import numpy, torch
import torch._dynamo  # 170 MB that every torch optimizer loads, not part of the data's memory
import partnets
from torch.utils.data import Dataset

N, WIDTH = 1_000_000, 16_384


class File(Dataset):
    rows = numpy.memmap(sys.argv[1], numpy.uint8, "r", shape=(N, WIDTH))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.from_numpy(self.rows[i].astype(numpy.float32)), i % 2


def resident():
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])


before, allowed = resident(), 200_000_000
data = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + allowed,) * 2)
try:
    numpy.ones(allowed)
except MemoryError:
    print("limited")
model = partnets.partition(torch.nn.Linear(WIDTH, 2), (0.8, 0.2))
chunks = partnets.chunk(File(), (0.9995, 0.0005))
trainer = partnets.Trainer(model, chunks, batch_size=32, lml_every=3, num_workers=1)
trainer.fit(3)
trainer.save(sys.argv[1] + ".pt")
print(len(chunks[1]), trainer.history.lml["lml"][0] < 0, resident() - before < allowed)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA and /proc need Linux")
def test_a_file_larger_than_the_memory_that_is_allowed_trains(tmp_path):
    path = tmp_path / "rows.bin"
    with path.open("wb") as file:
        file.truncate(1_000_000 * 16_384)  # a sparse file of 16 GB
    found = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["limited", "999500", "True", "True"]
