"""Test settings that must precede the import of PyTorch and Triton."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent
# Subprocesses of tests must import the checkout, not an installed package.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(ROOT / folder) for folder in ("", "python_api", "benchmarks")), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

# tiers.py selects the tests to run, budgets.py limits their time. Their tests run pytest.
sys.path.append(str(ROOT / "tests"))
pytest_plugins = ["tiers", "budgets", "pytester"]

# Without a GPU, Triton's kernels run interpreted. Triton reads this variable when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The interpreter also checks sums for overflow and discards the result, which no GPU does: a third of its time.
    if importlib.util.find_spec("triton"):
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
# poisoned_memory asks for deterministic algorithms, for which cuBLAS needs a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
importlib.import_module("cpu_torchvision")
# The tests' Flower app runs in separate processes. Other files import flwr, which needs Python 3.11 or later.
collect_ignore = ["tests/partnets/federated/flower_project"]
if not importlib.util.find_spec("flwr"):
    collect_ignore += ["python_api/partnets/federated/flower", "tests/partnets/federated/nodes.py"]
