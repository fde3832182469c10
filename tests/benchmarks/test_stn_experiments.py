"""Tests of the experiments of self-tuning networks: data, networks and every method, at a few steps."""

import math

import pytest
import torch
from pairwise import pairwise

from partbench.paper import stn_cnn, stn_lml, stn_lstm, stn_ridge, stn_schedules, tuning
from partbench.paper.experiment import EXPERIMENTS
from partbench.responses import CASES, PEERS, WORKS, Setup
from partnets import stn
from partnets.hyper.hyperparameter import named_values


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(tuning, "TRIALS", 2)


def test_ridge_is_known_in_closed_form():
    ridge = stn_ridge.Ridge(0)
    step = 1e-4
    difference = (ridge.best(0.3 + step) - ridge.best(0.3 - step)) / (2 * step)
    torch.testing.assert_close(ridge.jacobian(0.3), difference, rtol=1e-6, atol=1e-8)
    x, y = (each.double() for each in ridge.train)
    weight = ridge.best(0.3).requires_grad_()
    ((x @ weight - y).square().mean() + math.exp(0.3) / 2 * weight.square().sum()).backward()
    assert weight.grad.abs().max() < 1e-10
    assert ridge.least() <= ridge.validation_loss(ridge.best(0.3))


@pytest.mark.parametrize("method", [*stn_ridge.METHODS, "global"])
@pytest.mark.parametrize("tuned", [False, True])
def test_a_response_of_ridge_regression(method, tuned, tmp_path):
    setting = {"method": method, "seed": 0, "scale": 0.3, "start": 0.0, "tuned": tuned, "steps": 8, "hidden": 4}
    record = stn_ridge.StnRidge().train(setting, tmp_path / "checkpoint")
    assert (record["log_decay"] != 0.0) == tuned
    assert record["validation"] >= 1 - 1e-3 and len(record["shown"]) == 41


@pytest.mark.full
@pytest.mark.parametrize("hidden", stn_ridge.HIDDEN.values())
def test_a_response_of_ridge_regression_for_all_hyperparameters(hidden, tmp_path):
    setting = {"method": "global", "seed": 0, "hidden": hidden, "steps": 1000}
    record = stn_ridge.StnRidge().train({**setting, "start": 0.0, "tuned": False}, tmp_path)
    assert record["log_decay"] == 0.0
    assert record["response_error"] < (0.05 if hidden else 0.3) and record["jacobian_error"] < (0.3 if hidden else 0.6)
    record = stn_ridge.StnRidge().train({**setting, "start": -4.0, "tuned": True}, tmp_path)
    assert record["log_decay"] > -4.0 and record["validation"] < 1.2


def test_the_text_is_pythons_documentation():
    paragraphs = stn_lstm.documentation()
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    task = stn_lstm.documentation_task(0, steps=2)
    x, y = task.train.tensors
    assert x.shape == y.shape and torch.equal(x.flatten()[1:], y.flatten()[:-1])
    assert len(task.train) > 3 * len(task.validation) > 0
    assert stn_lstm.words_of("Don't --- use x[0].") == ["don", "'", "t", "---", "use", "x", "[", "0", "]."]
    (first, second), words = stn_lstm.encoded([["a", "a", "<unk>", "b", "<unk>", "c"], ["c", "a", "b"]], rarest=2)
    assert first.tolist() == [1, 1, 0, 0, 0, 0] and second.tolist() == [0, 1, 0] and words == 2


def test_penn_treebank_is_read_from_local_files(tmp_path, monkeypatch):
    (tmp_path / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(" no it was n't black monday \n" * 40)
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    task = stn_lstm.treebank_task(0, steps=2)
    assert task.train[0][0].shape == (stn_lstm.LENGTH,)
    assert len(task.space) == 7


def test_wikitext_is_read_from_local_files(tmp_path, monkeypatch):
    lines = [" the lobster of the sea \n", " \n", " a = b \n"]
    (tmp_path / "wikitext2-valid.txt").write_text("".join(lines[0] * 50))
    (tmp_path / "wikitext2-test.txt").write_text(lines[0] * 50 + lines[2] * 100)
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    task = stn_lstm.wikitext_task(0, steps=2)
    assert len(task.train) == 8 and len(task.validation) == len(task.test) == 9
    assert (task.validation[0][0] > 0).all()
    assert (task.test[0][0] == 0).sum() == 26  # words that are not in the training text, unlike <eos>


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (stn_lstm.wikitext_task, r"wikitext2-valid\.txt; expected WikiText-2's wiki\.valid\.tokens.*PARTNETS_DATA"),
        (stn_lstm.treebank_task, r"ptb\.train\.txt; expected Mikolov's Penn Treebank"),
    ],
)
def test_a_missing_text_is_named(task, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=message):
        task(0)


@pytest.mark.full
def test_alexnet_is_the_published_one():
    network = stn_cnn.AlexNet()
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_272_281
    assert stn_cnn.AlexNet(3)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    stn.convert(network, tuning.hypers(network))
    assert sum(values is not None for one in named_values(network).values() for values in one) == 15


@pytest.mark.cases(usual=2)
@pairwise(strength=1, method=tuning.METHODS, name=["digits", "documentation"])
def test_every_tuning_method_reports_losses_and_accuracy(name, method, tmp_path):
    if name == "digits":
        task = stn_cnn.digits_task(0, steps=3, examples=60)
    else:
        task = stn_lstm.documentation_task(0, steps=3, tokens=2000)
    task.hyper_after = 0
    record = tuning.tuned(task, method, 0, tmp_path / "checkpoint")
    found = [record, *(record[kind] for kind in ("final", "schedule") if kind in record)]
    assert len(found) == (3 if method in tuning.RETRAINED else 1)
    for each in found:
        assert each["validation"] > 0 and each["test"] > 0 and 0 <= each["test_accuracy"] <= 100
    if method in tuning.SELF_TUNING:
        assert record["values"].keys() == task.space.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", ["stn-ridge", "stn-lml"])
def test_experiments_at_quick_size(name, tmp_path, capsys):
    from partbench.paper.__main__ import main

    assert main([name, "--quick", "--out", str(tmp_path)]) == 0
    assert "claims hold" in capsys.readouterr().out
    assert list(tmp_path.glob("*.png")) and name in EXPERIMENTS


@pytest.mark.cases(usual=2, full=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peer", PEERS)
def test_timed_peers_compute_the_same_layer(peer, dtype):
    setup = Setup(CASES[-1], "cpu", dtype, 0)
    setup.check(peer)
    for work in WORKS:
        setup.call(peer, work)()
    assert setup.kept("each") <= 1.1 * setup.kept("torch")


def test_time_is_counted_to_the_lowest_loss_of_the_other():
    theirs = [(1.0, 0.5), (4.0, 0.3), (8.0, 0.4)]
    assert tuning._share_of_time([(1.0, 0.6), (2.0, 0.3), (3.0, 0.1)], theirs) == 0.25
    assert tuning._share_of_time([(1.0, 0.31)], theirs) == math.inf


@pytest.mark.cases(usual=1, full=4)
@pytest.mark.parametrize("dataset", stn_lml.StnLml.datasets)
@pytest.mark.parametrize("method", stn_lml.LABELS)
def test_tuning_without_a_validation_set_reports_the_test_loss(dataset, method, tmp_path, monkeypatch):
    small = {"digits": lambda *_: stn_cnn.digits_task(0, 3, 60)}
    small["documentation"] = lambda *_: stn_lstm.documentation_task(0, 3, 2000)
    monkeypatch.setattr(stn_lml, f"{dataset}_task", small[dataset])
    setting = {"dataset": dataset, "method": method, "seed": 0, "steps": 3}
    record = stn_lml.StnLml().train(setting, tmp_path / "checkpoint")
    assert record["test"] > 0 and ("lml" in record) == method.startswith("lml")


@pytest.mark.full
@pytest.mark.parametrize("method", ["stn", "delta", "fixed"])
def test_one_rate_by_every_schedule(method, tmp_path, monkeypatch):
    monkeypatch.setattr(stn_schedules, "documentation_parts", lambda seed: stn_lstm.documentation_parts(seed, 2000))
    setting = {"method": method, "seed": 0, "steps": 12, "start": 0.05}
    record = stn_schedules.StnSchedules().train(setting, tmp_path / "checkpoint")
    kinds = ("gaussian", "sinusoid") if method == "fixed" else ("final", "schedule")
    found = [record, *(record[kind] for kind in kinds)]
    assert len({each["validation"] for each in found}) == len(found)  # all trainings differ
