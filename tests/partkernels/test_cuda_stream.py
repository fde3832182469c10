"""The current stream, which is looked up in the loaded libtorch_cuda, because our library is not linked to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

# Stand-ins for PyTorch's libraries and ours; a stream's value is 1000 plus its device's number.
LIBTORCH_CPU = 'extern "C" void torch_cpu() {}'
LIBTORCH_CUDA = """
#include <cstdint>
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<intptr_t>(1000 + device));
  return device < 8 ? 0 : 1;
}
"""
OURS = """
#include <stdexcept>
#include "stream.h"
extern "C" intptr_t stream(int32_t device) try {
  return reinterpret_cast<intptr_t>(partkernels::binding::current_stream(device));
} catch (const std::runtime_error&) {
  return -1;
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    """Build the stand-ins in a folder; ours, like the real library, link only to libtorch_cpu."""
    folder = tmp_path_factory.mktemp("libraries")
    includes = [f"-I{ROOT / 'csrc' / 'torch' / 'cuda'}", f"-I{Path(torch.__file__).parent / 'include'}"]
    options = ["-std=c++20", "-shared", "-fPIC", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    for name, source in {"torch_cpu": LIBTORCH_CPU, "torch_cuda": LIBTORCH_CUDA, "ours": OURS}.items():
        code = folder / f"{name}.cpp"
        code.write_text(source)
        library = folder / f"lib{name}.so"
        links = [f"-Wl,-soname,{library.name}"]
        if name == "ours":
            links += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-Wl,--no-as-needed", "-ltorch_cpu", "-ldl"]
        command = [COMPILER, *options, *includes, str(code), "-o", str(library), *links]
        subprocess.run(command, check=True)
    return folder


def streams(libraries: Path, *, cuda: str, devices: tuple[int, ...] = (0,)) -> list[int]:
    """Return the streams that our library finds in a new process that loads libtorch_cuda in mode `cuda`, if any."""
    program = f"""
import ctypes
ctypes.CDLL("{libraries}/libtorch_cpu.so")
if "{cuda}":
    ctypes.CDLL("{libraries}/libtorch_cuda.so", mode=getattr(ctypes, "{cuda}", 0))
ours = ctypes.CDLL("{libraries}/libours.so")
ours.stream.restype = ctypes.c_ssize_t
print(*(ours.stream(device) for device in {devices}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize("cuda", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_the_stream_is_found_however_libtorch_cuda_was_loaded(libraries, cuda):
    assert streams(libraries, cuda=cuda, devices=(0, 3)) == [1000, 1003]


def test_a_pytorch_without_cuda_is_an_error_and_no_crash(libraries):
    assert streams(libraries, cuda="") == [-1]


def test_an_error_of_pytorch_raises_and_later_calls_succeed(libraries):
    assert streams(libraries, cuda="RTLD_LOCAL", devices=(9, 1)) == [-1, 1001]
