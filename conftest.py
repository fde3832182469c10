"""What must be said before PyTorch and Triton are imported."""

import dataclasses
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).parent
# Programs that tests start import what is tested, and not what is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(ROOT / folder) for folder in ("", "python_api", "benchmarks")), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)

# tiers.py and budgets.py: which tests run, and what they may take. Tests of them run pytest.
sys.path.append(str(ROOT / "tests"))
pytest_plugins = ["tiers", "budgets", "pytester"]

# Without a GPU, Triton's kernels run interpreted; Triton decides it as it reads them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # It also computes whether sums overflow, and throws the answer away: a third of its time. No GPU does.
    if importlib.util.find_spec("triton"):
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
# cuBLAS is deterministic, as poisoned_memory asks, only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The registry's torchvision is built for CUDA. Beside PyTorch's CPU build its operators do not load, and what it says
# of their shapes raises. timm, which imports it, needs none of them.
if torch.version.cuda is None:
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
# Which is imported where Flower is, of Python 3.11 or later.
if not importlib.util.find_spec("flwr"):
    collect_ignore = ["python_api/partnets/federated/flower"]
