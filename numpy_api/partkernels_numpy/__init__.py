"""Kernels for partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023) on numpy arrays.

Each entry of a weight belongs to one of C partitions. Subnetwork k uses the entries of partitions 1..k and default
values elsewhere. The functions compute with a subnetwork's weight without materialising it, on several threads, and
release the GIL. Maps, defaults and results are the same as in partkernels; torch is not needed.
"""

import os
from importlib.metadata import version

from partkernels_numpy import _library
from partkernels_numpy.arguments import InputError
from partkernels_numpy.arrays import plain
from partkernels_numpy.conv2d import conv2d, conv2d_grad_input, conv2d_grad_weight
from partkernels_numpy.defaults import Defaults, Normal, Stored, Uniform, Zeros
from partkernels_numpy.linear import linear, linear_grad_input, linear_grad_weight
from partkernels_numpy.optimizers import adam_step, sgd_step
from partkernels_numpy.partition import Partition
from partkernels_numpy.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

__all__ = [
    "Defaults",
    "InputError",
    "Normal",
    "Partition",
    "Stored",
    "Uniform",
    "Zeros",
    "__version__",
    "adam_step",
    "conv2d",
    "conv2d_grad_input",
    "conv2d_grad_weight",
    "instruction_set",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "set_threads",
    "sgd_step",
    "subnetwork_weight",
    "subnetwork_weight_grad",
    "threads",
]
__version__ = version("partkernels-numpy")
MOST_THREADS = 1024


def instruction_set() -> str:
    """Return the instruction set in use: the best one that the processor supports, or PARTKERNELS_CPU_ISA.

    Raises:
        RuntimeError: the processor does not support the instruction set in PARTKERNELS_CPU_ISA.

    Example:
        >>> instruction_set() in ("avx512_amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "portable")
        True
    """
    return _library.instruction_set()


def threads() -> int:
    """Return the number of threads of a call: OMP_NUM_THREADS, or the processors available to this process."""
    return _library.threads()


def set_threads(threads: int) -> None:
    """Set the number of threads of a call, at least 1. Results have the same bits for any number.

    Example:
        >>> before = threads()
        >>> set_threads(1)
        >>> threads()
        1
        >>> set_threads(before)
    """
    threads = plain(threads)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads={threads!r}; pass an int in 1..{MOST_THREADS}.")
    _library.set_threads(threads)


def _usual_threads() -> int:
    """Return OMP_NUM_THREADS (of a list for nested loops, the first), or the number of available processors."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and 1 <= int(asked) <= MOST_THREADS:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


set_threads(_usual_threads())
