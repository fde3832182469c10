"""Loggers write the history's contents, and a resumed training continues its files at the checkpoint."""

import copy
import csv
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


def logged(path, steps, every=1):
    trainer, log = fresh(), loggers.CSV(path, every=every)
    train(trainer, steps, log)
    log.close()
    return path.read_bytes()


def rows(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_csv_file_is_the_frame(tmp_path):
    trainer, path = fresh(), tmp_path / "training.csv"
    train(trainer, 11, loggers.CSV(path))
    pandas.testing.assert_frame_equal(pandas.read_csv(path), trainer.history.frame())


def test_rows_are_readable_while_training_goes_on(tmp_path):
    trainer, path = fresh(), tmp_path / "training.csv"
    log = loggers.CSV(path, every=3)
    written = []
    for _ in range(8):
        train(trainer, 1, log)
        written.append([row["step"] for row in rows(path)])
    assert written == [list("123456"[: step - step % 3]) for step in range(1, 9)]
    log.close()
    assert path.read_bytes() == logged(tmp_path / "other.csv", 8)


def torn(path):
    path.write_bytes(path.read_bytes() + b"4,2,0.")  # as if the disk was full


@pytest.mark.parametrize("change", [torn, lambda path: path.rename(path.with_suffix(".1")), lambda path: path.unlink()])
def test_a_file_that_something_has_happened_to_is_written_anew(tmp_path, change):
    trainer, path = fresh(), tmp_path / "training.csv"
    train(trainer, 3, log := loggers.CSV(path))
    change(path)
    train(trainer, 3, log)
    assert path.read_bytes() == logged(tmp_path / "other.csv", 6)


def test_the_first_metric_extends_the_header_and_leaves_earlier_cells_empty(tmp_path):
    trainer, path = fresh(), tmp_path / "training.csv"
    train(trainer, 4, log := loggers.CSV(path))
    assert path.read_text(encoding="utf-8").splitlines()[0].endswith(",lml")
    train(trainer, 2, log)
    assert [row["test accuracy"] != "" for row in rows(path)] == [False, False, False, False, True, False]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("saved", [2, 4, 7, 10])
@pytest.mark.parametrize("same", [True, False], ids=["same process", "new process"])
def test_an_interrupted_and_resumed_csv_file_has_the_bytes_of_an_uninterrupted_one(saved, every, same, tmp_path):
    expected = logged(tmp_path / "uninterrupted.csv", 17, every)

    trainer, path = fresh(), tmp_path / "training.csv"
    train(trainer, saved, log := loggers.CSV(path, every=every))
    checkpoint = copy.deepcopy(vars(trainer.history))
    train(trainer, 4, log)
    if not same:
        with path.open("a") as file:
            file.write("15,1,0.")  # cut off within a row
        trainer, log = fresh(), loggers.CSV(path, every=every)
    trainer.history, trainer.steps = History(**checkpoint), saved
    train(trainer, 1, log)
    assert len(path.read_text(encoding="utf-8").splitlines()) - 1 == saved + 1 - (saved + 1) % every
    train(trainer, 16 - saved, log)
    log.close()
    assert path.read_bytes() == expected


def test_an_interruption_while_the_header_is_extended_leaves_the_old_file(tmp_path, monkeypatch):
    trainer, path = fresh(), tmp_path / "training.csv"
    train(trainer, 4, log := loggers.CSV(path))
    before = path.read_bytes()

    def interrupted(file, columns, count):
        file.write("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(loggers, "_write_rows", interrupted)
    trainer.history.add_metrics(4, {"test accuracy": 0.5})
    with pytest.raises(KeyboardInterrupt):
        log.close()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_below_a_step_raises(every, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        loggers.CSV(tmp_path / "training.csv", every=every)


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
