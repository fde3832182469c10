"""Tests of python -m partbench.tuning: regrets of partnets.tune and of searches, by problem."""

import json

import pytest
import torch

from partbench.tuning import __main__ as command
from partbench.tuning.problems import CHOOSING, PROBLEMS, Case, adam, mlp


def tiny(seed, folder):
    torch.manual_seed(seed)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long()
    tuned = ["dropout:one", "weight_decay", "label_smoothing"]
    return Case(mlp(4, 8, 8, 2), (x[:40], y[:40]), (x[40:], y[40:]), tuned, 18, 16, adam(1e-2))


def test_a_problem_is_measured_once_and_tabulated(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.setitem(PROBLEMS, "tiny", tiny)
    monkeypatch.setattr(command, "GRID", 3)
    options = ["--out", str(tmp_path / "found.json"), "--problems", "tiny", "--seeds", "0"]
    assert command.main(options) == 0
    records = json.loads((tmp_path / "found.json").read_text())
    methods = [record["method"] for record in records]
    assert methods == ["untuned", "guess", "sobol", "random", "tpe", "tpe-batches", "tune-2", "grid", "grid", "grid"]
    assert all(record["cost"] <= 2.6 for record in records if "cost" in record)
    command.main([*options, "--methods", "untuned,guess"])
    assert len(json.loads((tmp_path / "found.json").read_text())) == len(records)
    assert "| tiny |" in capsys.readouterr().out
    assert torch.tensor(1e-45) * 1 != 0, "a command that was called left subnormal numbers flushed to 0"


def test_the_table_normalises_losses_by_the_gain_of_tuning():
    def record(method, loss):
        return {"problem": "wine", "seed": 0, "method": method, "loss": loss}

    grid = {"problem": "wine", "method": "grid", "losses": [0.2]}
    table = command.table([record("untuned", 1.0), record("guess", 0.6), record("tune-2", 0.2), grid])
    assert "| wine | 0.2000 | 1.0000 | 0.50 | 0.00 |" in table
    flat = command.table([record("untuned", 0.201), record("tune-2", 0.21), grid])
    assert "| wine | 0.2000 | 0.2010 | 1.00 |" in flat  # by a twentieth of the oracle's loss


@pytest.mark.parametrize(
    "name", [name for name in PROBLEMS if not name.startswith(("mnist", "cifar", "text", "resnet", "lora"))]
)
def test_a_problem_is_the_same_for_the_same_seed(name):
    pytest.importorskip("sklearn")
    first, again, other = (PROBLEMS[name](seed, None) for seed in (0, 0, 1))
    assert torch.equal(first.train[0], again.train[0]) and not torch.equal(first.train[0], other.train[0])
    assert all(torch.equal(*pair) for pair in zip(first.network.parameters(), again.network.parameters(), strict=True))
    assert set(CHOOSING) < set(PROBLEMS)


@pytest.mark.parametrize("instrument", command.INSTRUMENTS)
def test_a_single_instrument_gives_positions_between_0_and_1(instrument):
    case = tiny(0, None)
    positions, examples = command.learned(case, command.problem_of(case, 0), instrument, seed=0)
    assert positions.shape == (3,) and ((positions >= 0) & (positions <= 1)).all() and examples == 18 * 16
