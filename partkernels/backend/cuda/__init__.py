"""The CUDA C++ backend: csrc/cuda."""

import re
from functools import cache

import torch

from partkernels import build_info
from partkernels.backend.description import READY, Backend, load_library


@cache
def status() -> str:
    loaded = load_library("cuda")
    if loaded != READY:
        return loaded
    built = build_info.facts()["cuda"]
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"{built}; no GPU, or PyTorch was built without CUDA"
    major, minor = torch.cuda.get_device_capability()
    served = [tuple(divmod(int(number), 10)) for number in re.findall(r"sm_(\d+)", built)]
    newer = [divmod(int(number), 10) for number in re.findall(r"PTX (\d+)", built)]
    if any(major == m and minor >= n for m, n in served) or any((major, minor) >= each for each in newer):
        return READY
    return (
        f"{built}, and {torch.cuda.get_device_name()} has compute capability {major}.{minor}; if that is 8.0 or newer,"
        f" reinstall partkernels with PARTKERNELS_BUILD=cuda and TORCH_CUDA_ARCH_LIST={major}.{minor}, otherwise use"
        " triton or reference"
    )


BACKEND = Backend(
    "cuda",
    status,
    rank=3,
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    namespace="partkernels_cuda",
    automatic=False,  # no faster than Triton on an H200, and needs a build
    planned=frozenset({"forward"}),
)
