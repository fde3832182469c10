"""The Flower app of examples/federated runs and has the configuration that Flower reads."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

FOLDER = Path(__file__).parents[1] / "examples" / "federated"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rotated_digits", "run")]:
        del sys.modules[name]


@pytest.mark.full
def test_a_short_run_is_drawn(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--rounds", "1", "--clients", "10", "--out", str(tmp_path / "f.png")])
    example("run").main()
    assert (tmp_path / "f.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "FedAvg, round 1" in said and "partitioned, round 1" in said and "rotation ±7°" in said


def test_the_apps_are_where_pyproject_says(example):
    import tomli  # a dependency of Flower; Python 3.10 has no tomllib

    config = tomli.loads((FOLDER / "pyproject.toml").read_text())
    for side, path in config["tool"]["flwr"]["app"]["components"].items():
        module, _, name = path.partition(":")
        assert type(getattr(example(module), name)).__name__.lower() == side
    assert config["project"]["dependencies"] == []
    assert {*config["tool"]["flwr"]["app"]["config"]} == {"rounds", "fraction", "checkpoint"}


@pytest.mark.full
def test_the_server_app_goes_on_from_its_checkpoint(example, tmp_path):
    from flwr.app import Context, RecordDict

    from partnets.federated.flower import LocalGrid

    clients, server = example("rotated_digits.client_app"), example("rotated_digits.server_app")
    values = {}
    for name, rounds in (("whole", (2,)), ("stopped", (1, 2))):
        for number in rounds:
            config = {"rounds": number, "fraction": 1.0, "checkpoint": str(tmp_path / name)}
            context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
            server.app(LocalGrid(clients.app, 10), context)
        own = server.make_server()
        own.load(tmp_path / name)
        values[name] = own.values()
    assert own.rounds == 2
    assert all((values["whole"][name] == vector).all() for name, vector in values["stopped"].items())
