"""A run of the example in which a process is killed ends with the same bits as an uninterrupted run."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[3] / "examples" / "distributed.py"


def run(checkpoint):
    """Run the example without torchrun and without interruption."""
    torch.manual_seed(dist.get_rank())
    one = runpy.run_path(str(EXAMPLE))["trainer"](checkpoint, save_every=10, kill_at=None)
    one.fit(30)
    one.save(checkpoint)


def run_and_kill(checkpoint):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = ["--steps=30", "--save-every=10", "--kill-at=25", f"--checkpoint={checkpoint}"]
    run = subprocess.run([*torchrun, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def load(checkpoint):
    saved = torch.load(checkpoint)
    # Only torch's random state is seeded.
    return saved | {"noises": [noise["torch"] for noise in saved["noises"]]}


def differences(one, other, path=""):
    """Return the paths of values that are not bitwise equal."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, pair in pairs for found in differences(*pair, f"{path}.{i}")]
    return [] if one == other else [path]


@pytest.mark.full  # starts torchrun and two processes, twice
def test_a_run_of_which_a_process_was_killed_ends_with_the_same_bits(two_ranks, tmp_path):
    assert run_and_kill(tmp_path / "killed.pt").startswith("steps 20 to 30")
    two_ranks(run, tmp_path / "whole.pt")
    whole, killed = load(tmp_path / "whole.pt"), load(tmp_path / "killed.pt")
    assert differences(whole, killed) == []
    assert len(whole["noises"]) == 2 and not torch.equal(*whole["noises"])
