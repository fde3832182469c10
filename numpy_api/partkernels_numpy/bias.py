"""The bias of a subnetwork: a shared one, or b_1 + ... + b_k."""

from __future__ import annotations

import numpy as np

from partkernels_numpy.arguments import InputError
from partkernels_numpy.arrays import check_like
from partkernels_numpy.partition import Partition


def live_bias(bias: np.ndarray | None, weight: np.ndarray, partition: Partition, active: int) -> np.ndarray | None:
    """Return a bias [out] itself, or the sum of the active rows of a bias [C, out]; contiguous (Appendix I.2).

    Raises:
        InputError: the bias does not fit the weight.
    """
    if bias is None:
        return None
    bias, out = check_like("bias", bias, "the weight", weight), weight.shape[0]
    if bias.shape not in ((out,), (partition.num_partitions, out)):
        raise InputError(
            f"bias has shape {bias.shape}; this weight takes [{out}], or [{partition.num_partitions}, {out}] with a row"
            " for each partition."
        )
    if bias.ndim == 1:
        return np.ascontiguousarray(bias)
    total = np.zeros(out)
    for row in bias[:active]:
        total += row
    # bfloat16 goes through float32, in which the kernels accumulate it.
    return total.astype(np.float64 if weight.itemsize == 8 else np.float32).astype(weight.dtype, copy=False)
