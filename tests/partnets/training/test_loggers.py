"""Loggers write the history's contents, and a resumed training continues its files at the checkpoint."""

import copy
import random
import subprocess
import sys
from types import SimpleNamespace

import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from partnets import History
from partnets.training import loggers


def train(trainer, steps, *callbacks):
    """Simulate steps that depend only on their number, with L_ML every 4 steps and a metric every 5."""
    for step in range(trainer.steps + 1, trainer.steps + 1 + steps):
        draw = random.Random(step)
        psi = (2, draw.random()) if step % 2 else (None, None)
        trainer.history.add(step, 1 + step % 2, draw.random(), *psi, {"rotation, in °": draw.random()})
        trainer.steps = step
        if step % 4 == 0:
            trainer.history.add_lml(step, -100 * draw.random())
        if step % 5 == 0:
            trainer.history.add_metrics(step, {"test accuracy": draw.random()})
        for callback in callbacks:
            callback(trainer)


def fresh():
    return SimpleNamespace(history=History(), steps=0)


def test_a_csv_file_is_the_frame_of_the_last_multiple_also_after_resuming(tmp_path):
    trainer, path = fresh(), tmp_path / "training.csv"
    log = loggers.CSV(path, every=3)
    train(trainer, 8, log)
    pandas.testing.assert_frame_equal(pandas.read_csv(path), trainer.history.frame()[:6])
    checkpoint, steps = copy.deepcopy(vars(trainer.history)), trainer.steps
    train(trainer, 4, log)
    path.write_bytes(path.read_bytes() + b"13,1,0.")  # as if the disk was full
    resumed = SimpleNamespace(history=History(**checkpoint), steps=steps)
    train(resumed, 4, loggers.CSV(path, every=3))
    pandas.testing.assert_frame_equal(pandas.read_csv(path), trainer.history.frame())
    assert list(tmp_path.iterdir()) == [path]
    train(resumed, 1, log := loggers.CSV(path, every=3))
    log.close()  # writes the steps that every=3 has deferred
    pandas.testing.assert_frame_equal(pandas.read_csv(path), resumed.history.frame())


def scalars(folder):
    """Return {tag: {step: value}} as TensorBoard displays them."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def expected_scalars(history):
    """Return the expected float32 numbers of each tag at the steps that have them."""
    steps = history.steps["step"]
    records = {
        "loss": (steps, history.steps["loss"]),
        "hyper_loss": (steps, history.steps["hyper_loss"]),
        "lml": (history.lml["step"], history.lml["lml"]),
        "values/rotation, in °": (steps, history.values["rotation, in °"]),
        "metrics/test accuracy": history.metrics["test accuracy"].values(),
    }
    return {
        tag: {step: pytest.approx(value, rel=1e-6) for step, value in zip(*record, strict=True) if value is not None}
        for tag, record in records.items()
    }


def test_a_function_gets_the_scalars_that_tensorboard_shows():
    trainer, found = fresh(), {}

    def log(values, *, step):
        for name, value in values.items():
            found.setdefault(name, {})[step] = value

    train(trainer, 9, loggers.Scalars(log))
    assert found == expected_scalars(trainer.history)


@pytest.mark.parametrize("same", [True, False], ids=["same process", "new process"])
def test_tensorboard_shows_each_scalar_once_after_a_resumption(same, tmp_path):
    trainer = fresh()
    train(trainer, 5, log := loggers.TensorBoard(tmp_path))
    checkpoint = copy.deepcopy(vars(trainer.history))
    train(trainer, 4, log)
    if not same:
        log.close()
        trainer, log = fresh(), loggers.TensorBoard(tmp_path)
    trainer.history, trainer.steps = History(**checkpoint), 5
    train(trainer, 2, log)
    log.close()
    assert trainer.steps == 7 and scalars(tmp_path) == expected_scalars(trainer.history)


@pytest.mark.full
def test_tensorboard_gets_all_scalars_of_a_program_that_ends_without_closing(tmp_path):
    code = (
        "import sys, types; from partnets import History, loggers\n"
        "log, trainer = loggers.TensorBoard(sys.argv[1]), types.SimpleNamespace(history=History())\n"
        "for trainer.steps in range(1, 4): trainer.history.add(trainer.steps, 1, 0.5); log(trainer)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert scalars(tmp_path) == {"loss": {1: 0.5, 2: 0.5, 3: 0.5}}


def test_a_missing_tensorboard_is_named_with_the_cure(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if "tensorboard" in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard, or partkernels' extra 'tensorboard'"):
        loggers.TensorBoard(tmp_path)
