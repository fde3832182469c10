"""Tests of the paper's experiments at --quick size: their claims, resuming after an interruption, and the pages."""

import dataclasses
import json
import math
import re
import shutil

import image_files
import pandas as pd
import pytest
import torch

from partbench import baselines
from partbench.baselines import last_layer
from partbench.datasets import load, subset
from partbench.paper import report, runs
from partbench.paper.__main__ import main
from partbench.paper.experiment import EXPERIMENTS, Experiment
from partbench.paper.methods import Learner
from partbench.paper.recipes import RECIPES, recipe
from partnets.tuning.training import STARTS

PAPER = ("mnist-cpu", "cifar10-cpu", "wikitext")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a function that gives the records of an experiment's quick trainings, each made once."""
    folder, made = tmp_path_factory.mktemp("paper"), {}

    def records(name):
        if name not in made:
            main([name, "--quick", "--out", str(folder)])
            (path,) = folder.glob(f"{name}-*.json")
            made[name] = report.Report.load(path)
        return made[name]

    return records


def claims(made):
    return {claim.text: claim for claim in EXPERIMENTS[made.experiment].claims(pd.DataFrame(made.records))}


@pytest.mark.full  # trains for ten seconds to a minute
@pytest.mark.parametrize("name", ["validation", "moving"])
def test_other_experiments_learn_and_check_every_claim(name, quick):
    made = quick(name)
    for record in made.records:
        assert 20 < record["accuracy"] <= 100 and math.isfinite(record["loss"])
    assert made.text().count("| yes |") + made.text().count("| **no** |") == len(claims(made))


@pytest.mark.full  # trains for ten seconds to a minute
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:dropout .ConcreteDropout. learns directly:UserWarning")  # as in the paper
def test_adapters_learn_and_check_every_claim(quick):
    pytest.importorskip("peft", reason="an experiment of its own extra")
    made = quick("adapters")
    for record in made.records:
        assert record["text"] < record["base"] and 0.9 < record["of_w"] < 1.02 and 0.9 < record["of_psi"] < 1.02
    assert made.text().count("| yes |") + made.text().count("| **no** |") == len(claims(made)) == 8


RESULTS = sorted(report.RESULTS.glob("*.json"))


@pytest.mark.cases(usual=8)
@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_every_committed_result_has_a_table_and_claims(path):
    made = report.Report.load(path)
    assert made.text().count("| yes |") + made.text().count("| **no** |") == len(claims(made)) > 0


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("path", RESULTS[::4], ids=lambda path: path.stem)
def test_every_experiment_draws_its_figure_from_its_committed_results(path, tmp_path):
    report.Report.load(path).draw(tmp_path / path.name)
    picture = (tmp_path / path.name).with_suffix(".png")
    assert 5000 < picture.stat().st_size < 400_000
    assert path.with_suffix(".png").exists()


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.partial_results])
def test_a_part_of_the_results_has_a_table_claims_and_a_figure(name, tmp_path):
    found = map(report.Report.load, report.RESULTS.glob(f"{name}-*.json"))
    for made in [one for one in found if one.experiment == name]:
        methods = [*{one["method"]: None for one in made.records}]
        for method in methods:
            mine = [one for one in made.records if one["method"] == method]
            alone = dataclasses.replace(made, records=mine)
            assert len(alone.text().splitlines()) > 6, method
        alone.draw(tmp_path / "alone.json")
        fewer_seeds = [one for one in made.records if one["method"] != methods[0] or one["seed"] == 0]
        assert dataclasses.replace(made, records=fewer_seeds).claims()


def test_an_incomplete_experiment_exits_and_counts_finished_trainings(tmp_path, monkeypatch):
    monkeypatch.setattr(EXPERIMENTS["stn-ridge"], "train", lambda *_: {"seconds": 1.0})
    with pytest.raises(SystemExit, match="5 of 96 trainings are finished; the table and the picture need all"):
        main(["stn-ridge", "--out", str(tmp_path), "--only", "method=stn", "--only", "seed=0"])
    assert len(report.Report.load(tmp_path / "stn-ridge-synthetic.json").records) == 5


@pytest.fixture
def trained(monkeypatch):
    """Return the settings that an augmentation experiment trains, without any training."""
    seen = []
    found = {"accuracy": 90.0, "loss": 0.5, "psi": {}}
    monkeypatch.setattr(EXPERIMENTS["augmentation"], "train", lambda one, _: seen.append(one) or found)
    return seen


def test_a_part_of_the_trainings_may_be_run_and_shown(tmp_path, trained, capsys):
    options = ["augmentation", "--seeds", "0", "--out", str(tmp_path)]
    main([*options, "--only", "method=standard", "--only", "rotated=False"])
    found = report.Report.load(tmp_path / "augmentation-digits.json")
    assert {(one["method"], one["rotated"]) for one in found.records} == {("standard", False)} and len(
        found.records
    ) == 3
    assert "--only" not in found.command and "3 trainings" in capsys.readouterr().out
    main([*options, "--finished"])
    assert report.Report.load(tmp_path / "augmentation-digits.json").records == found.records


def test_results_without_their_trainings_files_are_not_trained_again(tmp_path, trained):
    options = ["augmentation", "--out", str(tmp_path), "--only", "rotated=False"]
    main([*options, "--seeds", "0", "--only", "method=standard"])
    shutil.rmtree(tmp_path / "augmentation-digits.runs")
    main([*options, "--seeds", "1", "--only", "method=standard", "--only", "examples=250"])
    assert [(one["seed"], one["examples"]) for one in trained] == [(0, 250), (0, 500), (0, 1297), (1, 250)]
    shutil.rmtree(tmp_path / "augmentation-digits.runs")
    main([*options, "--seeds", "2", "--finished"])  # no training has this seed; the others stay
    made = report.Report.load(tmp_path / "augmentation-digits.json")
    assert len(made.records) == len(trained) == 4 and made.command.endswith("--seeds 0,1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "method"], "method is not NAME=VALUE"),
        (["--only", "methods=standard"], "no setting 'methods'; pass one of dataset, rotated, method"),
        (["--only", "method=standrd"], "no training has method=standrd; pass one of standard, validation"),
        (["--seeds", "0,0"], "0,0 has a negative or a repeated seed"),
        (["--jobs", "0"], "0 is below 1"),
        (["--finished"], "has no finished training; leave out --finished"),
    ],
)
def test_wrong_options_train_nothing_and_write_nothing(options, message, tmp_path, trained, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["augmentation", "--out", str(tmp_path), *options])
    assert message in f"{ended.value} {capsys.readouterr().err}"
    assert not trained and not list(tmp_path.glob("*.json"))


def test_a_trainings_file_of_another_training_is_damaged(tmp_path, trained):
    options = ["augmentation", "--out", str(tmp_path), "--seeds", "0", "--only", "method=standard"]
    main(options)
    path = next((tmp_path / "augmentation-digits.runs").iterdir())
    path.write_text('{"accuracy": 1.0}')
    with pytest.raises(ValueError, match=f"{path.name} is damaged .it belongs to another training.; delete it"):
        main(options)


def test_bfloat16_is_autocast_and_channels_last_with_results_of_its_own(tmp_path, monkeypatch):
    seen = []

    def train(one, checkpoint):
        weight = Learner.of(one, checkpoint).network()[1][2].weight
        seen.append((torch.is_autocast_enabled("cpu"), weight.is_contiguous(memory_format=torch.channels_last)))
        return {"accuracy": 90.0, "loss": 0.5, "psi": {}}

    monkeypatch.setattr(EXPERIMENTS["augmentation"], "train", train)
    options = ["--only", "method=standard", "--only", "rotated=False", "--only", "examples=250"]
    main(["augmentation", "--bfloat16", "--seeds", "0", "--out", str(tmp_path), *options])
    assert seen == [(True, True)]
    made = report.Report.load(tmp_path / "augmentation-digits-bfloat16.json")
    assert "--bfloat16" in made.command and made.records[0]["bfloat16"]


class Interrupted(Experiment):
    """An experiment that fails at one of its trainings, once."""

    name = "interrupted"

    def __init__(self, failing):
        self.failing, self.trained = failing, []

    def train(self, setting, checkpoint):
        if setting["seed"] == self.failing:
            self.failing = None
            raise KeyboardInterrupt
        self.trained.append(setting["seed"])
        return {"double": 2 * setting["seed"]}


def test_finished_trainings_are_kept_and_not_repeated(tmp_path):
    experiment, settings = Interrupted(failing=2), [{"seed": seed} for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        runs.run(experiment, settings, tmp_path)
    records = runs.run(experiment, settings, tmp_path)
    assert experiment.trained == [0, 1, 2, 3]
    assert [record["double"] for record in records] == [0, 2, 4, 6]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.full
@pytest.mark.parametrize(
    "method", ["partitioned", "nested", "one_pass", "ensemble", "validation", "augerino", "retraining"]
)
def test_an_interrupted_training_goes_on_to_the_same_result(method, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr("partbench.paper.methods.FINETUNE_EPOCHS", 1)
    data = subset(load("digits", rotated=True), 64)

    def result(name):
        torch.manual_seed(0)
        learner = Learner(recipe("digits", quick=True), data, 0, steps=5, checkpoint=tmp_path / f"{name}.checkpoint")
        return getattr(learner, method)()

    whole = result("whole")
    original, left = runs.partnets.Trainer.step, [4]

    def step(trainer):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        original(trainer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs.partnets.Trainer, "step", step)
        result("interrupted")
    assert result("interrupted") == whole


@pytest.mark.full
def test_tune_takes_as_many_passes_and_predicts_by_one_copy_or_by_several(tmp_path, monkeypatch):
    monkeypatch.setattr("partnets.tuning.run.STARTS", STARTS[:1])  # 20 steps teach so little that widths begin again
    data = subset(load("digits", rotated=True), 64)
    learner = Learner(recipe("digits", quick=True), data, 0, steps=20, checkpoint=tmp_path / "x.checkpoint")
    torch.manual_seed(0)
    found = learner.tune()
    assert 1 < found["cost"] < 2.5 and found["psi"]["rotation"] > 0
    assert 0 < found["averaged_accuracy"] <= 100 and math.isfinite(found["loss"])
    assert learner.tune() == found  # from its checkpoint


def test_the_last_layers_likelihood_takes_as_many_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("partbench.paper.methods.PRETRAINING", 2)
    data = subset(load("digits", rotated=True), 128)
    learner = Learner(recipe("digits", quick=True), data, 0, steps=3, checkpoint=tmp_path / "x.checkpoint")
    seen = []
    monkeypatch.setattr(
        baselines,
        "last_layer",
        lambda *given, steps, pretraining, **options: (
            seen.append(steps + pretraining) or last_layer(*given, steps=steps, pretraining=pretraining, **options)
        ),
    )
    found = learner.last_layer()
    assert seen == [6] and math.isfinite(found["loss"]) and "rotation_min" in found["psi"]


@pytest.mark.full
def test_searches_share_the_steps_of_one_partitioned_run(tmp_path):
    data = subset(load("digits", rotated=True), 64)
    learner = Learner(recipe("digits", quick=True), data, 0, steps=6, checkpoint=tmp_path / "x.checkpoint")
    assert 0 < learner.tpe()["psi"]["rotation"] < 180
    steps = [torch.load(path, weights_only=True)["history"]["steps"]["step"][-1] for path in tmp_path.glob("x.trial*")]
    assert steps == [2] * 6


@pytest.mark.full
@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "tiny-imagenet"])
def test_the_papers_data_sets_run_from_local_files(dataset, tmp_path, monkeypatch):
    image_files.write(dataset, tmp_path, monkeypatch)
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    small = {"sizes": (20,), "steps": (1,), "batch": 2, "samples": 2, "plain_batch": 4}
    monkeypatch.setitem(RECIPES, dataset, dataclasses.replace(RECIPES[dataset], **small))
    for name, experiment in EXPERIMENTS.items():
        if name in ("augmentation", "retraining"):
            for i, setting in enumerate(experiment.settings(dataset, (0,), quick=True)[:2]):
                record = experiment.train(setting | {"examples": 20}, tmp_path / f"{name}{i}.checkpoint")
                assert 0 <= record["accuracy"] <= 100


def test_a_missing_data_set_is_named_with_the_place_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTNETS_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        main(["augmentation", "--dataset", "cifar10", "--quick", "--out", str(tmp_path / "out")])


@pytest.mark.full
def test_pages_of_the_documentation_are_made_of_the_committed_results():
    text = {page.stem: page.read_text() for page in report.pages()}
    assert all(report.filled(text[page], report.RESULTS) == text[page] for page in text)
    assert text.keys() == {report.INDEX.stem, "augmentation-digits", *EXPERIMENTS}
    shown = [(name, page) for page in text for name in re.findall(r"<!-- result: (\S+) -->", text[page])]
    of = {path.stem: report.Report.load(path).experiment for path in RESULTS}
    assert sorted(name for name, _ in shown) == sorted(of)
    assert [(name, page) for name, page in shown if page not in (name, of[name])] == []


def test_committed_results_say_how_to_make_them():
    for path in report.RESULTS.glob("*.json"):
        contents = json.loads(path.read_text())
        assert contents["command"].startswith(f"python -m partbench.paper {contents['experiment']} ")
        # The paper's data take hours, so there are fewer seeds, as the pages say.
        assert contents["dataset"] in PAPER or len({record["seed"] for record in contents["records"]}) >= 3
