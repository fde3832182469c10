"""A check of partkernels_numpy without torch: its results match the definition, and its examples run.

usage: python -W error numpy_alone.py
"""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import numpy as np

import partkernels_numpy as pkn

EXAMPLES = Path(__file__).parents[1] / "examples" / "numpy"


def check_layer() -> None:
    """Compare `linear` and its gradients with their definition."""
    rng = np.random.default_rng(0)
    partition = pkn.Partition.random((30, 70), (0.5, 0.3, 0.2), seed=1, defaults=pkn.Normal(0.5, seed=2))
    x, weight, bias = rng.standard_normal((9, 70)), rng.standard_normal((30, 70)), rng.standard_normal((3, 30))
    w_2 = np.where(partition.ids() <= 2, weight, partition.defaults.values((30, 70), np.float64))
    y = pkn.linear(x, weight, partition, 2, bias=bias)
    np.testing.assert_allclose(y, x @ w_2.T + bias[:2].sum(0), rtol=1e-12)
    np.testing.assert_allclose(pkn.linear_grad_input(y, weight, partition, 2), y @ w_2, rtol=1e-12)
    grad = pkn.linear_grad_weight(y, x, partition, 2)
    np.testing.assert_allclose(grad, np.where(partition.mask(2), y.T @ x, 0), rtol=1e-11)


def check_examples() -> None:
    example = runpy.run_path(str(EXAMPLES / "input_mask.py"))
    network, accuracy = example["train"](learns_psi=True)
    useful, noise = np.split(network.probabilities(), [example["USEFUL"]])
    assert useful.min() > 0.9 and noise.mean() < 0.4 and accuracy > 0.88, (useful, noise, accuracy)
    if importlib.util.find_spec("jax"):
        runpy.run_path(str(EXAMPLES / "from_jax.py"), run_name="__main__")


if __name__ == "__main__":
    assert importlib.util.find_spec("torch") is None
    check_layer()
    check_examples()
    print("partkernels_numpy works without torch")
