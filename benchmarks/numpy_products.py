"""Benchmarks of partkernels_numpy against dense numpy products, by pytest-benchmark; documented in docs/numpy.md.

numpy's side is the dense layer, so the difference is the cost of partitioning. Its convolution is the usual one in
numpy: sliding windows and a product.

usage: python -m pytest benchmarks/numpy_products.py -c /dev/null --confcutdir=benchmarks
"""

from __future__ import annotations

import numpy as np
import pytest

import partkernels_numpy as pkn

PROPORTIONS, ACTIVE = (0.8, 0.1, 0.1), 2
LINEAR = [(1, 1024, 1024), (32, 512, 512), (256, 1024, 1024), (1024, 1024, 1024)]
IMAGES = [(64, 64, 64, 16), (64, 96, 128, 8)]


def of(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def partition(*shape: int) -> pkn.Partition:
    return pkn.Partition.random(shape, PROPORTIONS, seed=0, defaults=pkn.Uniform(0.05, seed=1))


def windows(x: np.ndarray) -> np.ndarray:
    """Return the 3x3 neighbourhoods of images padded by 1: [batch * height * width, channels * 9]."""
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    views = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return views.transpose(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * 9)


def dense_conv2d(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    batch, _, height, width = x.shape
    y = windows(x) @ w.reshape(len(w), -1).T
    return np.ascontiguousarray(y.reshape(batch, height, width, -1).transpose(0, 3, 1, 2))


def linear_pairs(rows: int, ins: int, outs: int) -> dict:
    x, grad, w, p = of(rows, ins), of(rows, outs), of(outs, ins), partition(outs, ins)
    return {
        "linear": (lambda: pkn.linear(x, w, p, ACTIVE), lambda: x @ w.T),
        "linear_grad_input": (lambda: pkn.linear_grad_input(grad, w, p, ACTIVE), lambda: grad @ w),
        "linear_grad_weight": (lambda: pkn.linear_grad_weight(grad, x, p, ACTIVE), lambda: grad.T @ x),
    }


def conv2d_pairs(batch: int, ins: int, outs: int, size: int) -> dict:
    x, w, p = of(batch, ins, size, size), of(outs, ins, 3, 3), partition(outs, ins, 3, 3)
    return {"conv2d": (lambda: pkn.conv2d(x, w, p, ACTIVE, padding=1), lambda: dense_conv2d(x, w))}


CASES = {
    f"{name} {'x'.join(map(str, size))}": pair
    for sizes, pairs in ((LINEAR, linear_pairs), (IMAGES, conv2d_pairs))
    for size in sizes
    for name, pair in pairs(*size).items()
}


@pytest.mark.parametrize("side", ["partkernels_numpy", "numpy"])
@pytest.mark.parametrize("case", CASES)
def test_product(benchmark, case, side):
    benchmark.group = case
    benchmark(CASES[case][side == "numpy"])
