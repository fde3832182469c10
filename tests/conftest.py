import os

import pytest
import torch

# cuBLAS is deterministic, as poisoned_memory asks, only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
