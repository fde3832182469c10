"""What must be said before PyTorch and Triton are imported."""

import os

import torch

# Without a GPU, Triton's kernels run interpreted; Triton decides it as it reads them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuBLAS is deterministic, as poisoned_memory asks, only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
