"""A History's table and plot contain all records, including gaps; records that would be lost are rejected."""

import dataclasses
import math

import pytest
import torch

from partnets import History
from partnets.training import plots


def recorded(steps=40):
    """Return a history with steps of ψ at even steps and the highest L_ML in the middle, while the loss falls."""
    history = History()
    for step in range(1, steps + 1):
        psi = (2, 1.0 + step) if step % 2 == 0 else (None, None)
        history.add(step, 1 + step % 3, 1 / step, *psi, {"augmentation.rotation": 7.0 + step})
        if step % 10 == 0:
            history.add_lml(step, -100.0 - abs(step - steps / 2))
            history.add_metrics(step, {"test accuracy": step / 100})
    return history


def axes_of(figure, title):
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    return axes


def test_a_history_is_rebuilt_from_plain_values():
    history = recorded()
    assert History(**dataclasses.asdict(history)) == history


def test_the_table_is_nan_where_nothing_was_evaluated():
    frame = recorded(12).frame()
    columns = ["step", "k", "loss", "hyper_k", "hyper_loss", "augmentation.rotation", "lml", "test accuracy"]
    assert list(frame.columns) == columns and len(frame) == 12
    for name, expected in (("lml", [10]), ("test accuracy", [10]), ("hyper_loss", [2, 4, 6, 8, 10, 12])):
        assert frame["step"][frame[name].notna()].tolist() == expected
    assert [str(kind) for kind in frame.dtypes] == ["int64"] * 2 + ["float64"] * 6


def test_the_table_keeps_the_last_of_two_evaluations_of_a_step():
    history = recorded(12)
    history.add_lml(12, -1.0)
    history.add_lml(12, -2.0)
    lml = history.frame()["lml"]
    assert len(lml) == 12 and lml.dropna().tolist() == [-104.0, -2.0]


@pytest.mark.parametrize(
    "record",
    [
        lambda history: history.add(41, 1, 0.5, values={"loss": 1.0, "augmentation.rotation": 1.0}),
        lambda history: history.add(41, 1, 0.5),
        lambda history: history.add_metrics(41, {"test accuracy": 1.0, "lml": 2.0}),
        lambda history: history.add_metrics(41, {"test accuracy": 1.0, "augmentation.rotation": 2.0}),
        lambda history: history.add_metrics(41, {"test accuracy": 1.0, "step": 2.0}),
        lambda history: history.add_metrics(41, {"test accuracy": 1.0, "ECE": "low"}),
        lambda history: history.add_metrics(41, {"test accuracy": 1.0, "ECE": None}),
        lambda history: history.add_metrics(39, {"ECE": 1.0, "test accuracy": 1.0}),
        lambda history: history.add_lml(39, -1.0),
    ],
)
def test_invalid_records_raise_and_leave_the_history_unchanged(record):
    history = recorded()
    with pytest.raises((ValueError, TypeError), match=r"pass|give|choose"):
        record(history)
    assert history == recorded()


@pytest.mark.parametrize("name", ["loss", "lml", "hyper_k"])
def test_a_hyperparameter_cannot_have_the_name_of_another_column(name):
    history = History()
    with pytest.raises(ValueError, match=rf"'{name}' is already a column"):
        history.add(1, 1, 0.5, values={name: 1.0})
    assert history == History()


def test_recorded_tensors_are_stored_as_floats():
    history = History()
    history.add_metrics(1, {"test accuracy": torch.tensor(0.5)})
    assert type(history.metrics["test accuracy"]["value"][0]) is float


def test_the_best_lml_is_the_first_highest_finite_one():
    history = History()
    assert history.best_lml() is None
    for step, lml in enumerate((-math.inf, -5.0, math.nan, -3.0, -3.0, -4.0)):
        history.add_lml(step, lml)
    assert history.best_lml() == (3, -3.0)


@pytest.mark.parametrize("window", [1, 3, 10, 99])
def test_the_running_mean_is_that_of_the_last_finite_values(window):
    values = [1.0, None, 3.0, math.nan, None, 8.0, math.inf, 1e30, 2.0, 5.0, 4.0]
    finite = [value is not None and math.isfinite(value) for value in values]
    for i, mean in enumerate(plots.running_mean(values, window)):
        last = [values[j] for j in range(max(0, i - window + 1), i + 1) if finite[j]]
        assert math.isnan(mean) if not last else mean == pytest.approx(sum(last) / len(last))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("hyperparameters", [0, 1, 2, 3, 9, 10])
def test_lml_stands_beside_the_losses_over_the_same_steps(hyperparameters):
    history = recorded()
    history.values = {f"mask.{i}": [0.5] * 40 for i in range(hyperparameters)}
    figure = history.plot()
    lml, losses = axes_of(figure, "L_ML [nats]"), axes_of(figure, "loss [nats per example]")
    figure.draw_without_rendering()
    assert lml.get_position().y0 == pytest.approx(losses.get_position().y0, abs=0.01)
    assert lml.get_position().x1 < losses.get_position().x0
    assert lml.get_xlim() == losses.get_xlim() == (0, 40)
    for axes in (lml, losses):  # both plots mark the best L_ML
        assert [20, 20] in [list(line.get_xdata()) for line in axes.lines]


def test_steps_without_an_update_of_psi_are_gaps_and_its_lone_values_points():
    axes = axes_of(recorded().plot(), "loss [nats per example]")
    (raw,) = [line for line in axes.lines if list(line.get_ydata())[1:4:2] == [3.0, 5.0]]
    assert [math.isnan(y) for y in raw.get_ydata()] == [True, False] * 20
    assert raw.get_markevery() == list(range(1, 40, 2))  # isolated points need markers to be visible


@pytest.mark.cases(usual=0, full=3)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("loss", [0.5, math.inf, math.nan])
def test_every_history_can_be_drawn(loss, suffix, tmp_path):
    one = History()
    one.plot(tmp_path / f"empty.{suffix}")
    one.add(1, 1, loss, 2, loss, {r"no $\formula$": loss})
    one.add_lml(1, -loss)
    one.add_metrics(1, {rf"metric {i} $\formula$": loss for i in range(12)})
    one.plot(tmp_path / f"one.{suffix}")
    assert len(list(tmp_path.iterdir())) == 2
