"""Tests of the command line, as users call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from partbench.cli import main
from partbench.report import readme
from partbench.results import Results
from partbench.suites import SUITES

TINY = ["--preset", "tiny"]


# All suites take half a minute: tests that need it are marked `full`.
@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("results") / "all.json"
    assert main(["all", *TINY, "--out", str(path)]) == 0
    return path


@pytest.mark.full
def test_all_suites_save_figures_machine_and_versions_in_one_file(measured):
    results = Results.load(measured)
    assert {record.suite for record in results.records} == set(SUITES)
    assert all(record.samples for record in results.records)
    assert all(len(record.samples) == 2 for record in results.records if record.suite != "memory")
    assert results.rooflines["copy"] > 0 and results.rooflines["matmul float32"] > 0
    assert {"processor", "cores", "instructions"} <= results.machine.keys()
    assert {"torch", "python", "partkernels"} <= results.versions.keys()
    keys = [record.key for record in results.records]
    assert len(set(keys)) == len(keys)


@pytest.mark.full
def test_report_makes_a_page_and_compare_finds_no_change_in_a_file_and_itself(measured, tmp_path, capsys):
    assert main(["report", str(measured), "--out", str(tmp_path / "page.html")]) == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert main(["compare", str(measured), str(measured)]) == 0
    assert "Nothing changed beyond noise." in capsys.readouterr().out


def test_users_measure_their_own_layers(tmp_path):
    path = tmp_path / "speed.json"
    command = ["speed", *TINY, "--linear", "3x16x24", "--conv2d", "2x4x6x6,8x2x3x3,padding=1,groups=2,stride=2"]
    command += ["--dtypes", "float64,bfloat16", "--bits", "1,8", "--defaults", "normal", "--active", "2"]
    command += ["--works", "forward,training", "--passes", "1", "--out", str(path)]
    assert main(command) == 0
    records = Results.load(path).records
    assert {record.case["shape"] for record in records} == {
        "3×16×24",
        "2×4×6×6, 8×2×3×3, stride 2, padding 1, groups 2",
    }
    assert {record.case["dtype"] for record in records} == {"float64", "bfloat16"}
    assert {(record.case["bits"], record.case["partitions"]) for record in records} == {(1, 2), (8, 32)}
    assert {record.case["work"] for record in records} == {"forward", "training"}
    assert {record.case["active"] for record in records} == {2}
    assert {len(record.samples) for record in records} == {1}


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("suite", ["memory", "step", "optim"])
def test_users_measure_their_own_model(suite, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Norm(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale, self.running_size = nn.Parameter(torch.ones(())), nn.Buffer(torch.ones(()))\n"
        "    def forward(self, x):\n"
        "        return self.scale * x / self.running_size\n"
        "def net():\n"
        "    features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(2, 16), Norm(), nn.PReLU())\n"
        "    return nn.Sequential(features, nn.Flatten(), nn.Linear(576, 5))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "results.json"
    command = [suite, *TINY, "--model", "mine:net", "--input", "3,8,8", "--classes", "5", "--batch", "2"]
    assert main([*command, "--out", str(path)]) == 0
    records = Results.load(path).records
    assert {record.case["model"] for record in records} == {"mine:net"}
    if suite == "memory":
        assert {record.facts["dense layers"] for record in records if not record.missing} == {"Norm"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--linear", "3x4"], "'3x4' has 2 sizes; pass 3, MxNxK as in 256x1024x1024"),
        (["speed", "--linear", "3x4x-5"], "'3x4x-5' has '-5'; pass MxNxK"),
        (["speed", "--conv2d", "1x1x4x4,1x1x3x3,pad=1"], "has 'pad'; known are stride, padding, dilation and groups"),
        (["speed", "--conv2d", "2x3x8x8,4x5x3x3"], "'2x3x8x8,4x5x3x3' is no convolution: "),
        (["speed", "--backends", "magic"], "'magic' is unknown; pass some of reference, cpu, triton, cuda"),
        (["speed", "--bits", "3"], "--bits has 3; pass some of 1,2,4,8"),
        (["speed", "--active", "4"], "--active has 4, but there are 3 partitions; pass 1..3"),
        (["speed", "--threads", "0"], "'0' has '0'; pass a positive integer"),
        (["speed", "--backends", "cuda"], "the backend 'cuda' cannot run here: "),
        (["speed", "--device", "cuda"], "there is no CUDA device here; pass --device cpu"),
        (["memory", "--model", "vgg"], "model 'vgg' is unknown; pass one of"),
        (["memory", "--model", "no.such:thing", "--input", "3", "--classes", "2"], "cannot be imported"),
        (
            ["memory", "--preset", "tiny", "--model", "torch.nn:Identity", "--input", "3", "--classes", "2"],
            "made a module that has no parameters",
        ),
        (["step", "--model", "torch.nn:Linear"], "needs --input, as in 3,32,32, and --classes, as in 10"),
        (["memory", "--linear", "8x16x16"], "unrecognized arguments: --linear 8x16x16"),
        (["report", "nowhere.json"], "nowhere.json"),
        ([], "COMMAND"),
    ],
)
def test_invalid_arguments_exit_with_status_2_and_name_the_cure(arguments, message, capsys, tmp_path):
    if arguments:
        arguments = [*arguments, "--out", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.full
def test_figures_stay_where_a_run_is_interrupted(tmp_path, monkeypatch, capsys):
    def interrupted(batches, *, save):
        raise KeyboardInterrupt

    monkeypatch.setattr("partbench.measuring.timing.measure", interrupted)
    path = tmp_path / "all.json"
    with pytest.raises(SystemExit) as exit:
        main(["all", *TINY, "--out", str(path)])
    assert exit.value.code == 130 and "interrupted; the file has what was measured" in capsys.readouterr().err
    assert {record.suite for record in Results.load(path).records} == {"memory"}


def test_a_refused_figure_fails_the_command_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    from partkernels.backend.reference import operators

    right = operators.linear
    monkeypatch.setattr(operators, "linear", lambda *arguments: right(*arguments) + 0.1)
    path = tmp_path / "speed.json"
    command = ["speed", *TINY, "--backends", "reference", "--linear", "4x8x8", "--works", "forward", "--active", "1"]
    assert main([*command, "--out", str(path)]) == 1
    assert "off by" in capsys.readouterr().err
    records = {record.peer: record for record in Results.load(path).records}
    assert records["partkernels reference"].refused and not records["partkernels reference"].samples
    assert records["dense"].samples


@pytest.mark.full
def test_a_readme_without_its_markers_stays_as_it_is(tmp_path, measured):
    path = tmp_path / "README.md"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="has no place for tables"):
        readme.write(path, [Results.load(measured)])
    assert path.read_text() == "nothing here"
    path.write_text(f"above\n{readme.BEGIN}\nold\n{readme.END}\nbelow")
    readme.write(path, [Results.load(measured)])
    text = path.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow") and "old" not in text
    assert "| linear forward, float32, 2-bit map" in text


@pytest.mark.full
def test_figures_are_added_to_a_file_of_the_same_circumstances_and_never_replaced(tmp_path, capsys):
    out, command = tmp_path / "some.json", [*TINY, "--add", "--operator", "linear", "--works", "forward"]
    assert main(["optim", *TINY, "--out", str(out)]) == 0
    assert main(["speed", *command, "--out", str(out)]) == 0
    both = Results.load(out)
    assert {record.suite for record in both.records} == {"optim", "speed"}
    assert {record.case["operator"] for record in both.records if record.suite == "speed"} == {"linear"}
    with pytest.raises(SystemExit):
        main(["speed", *command, "--out", str(out)])
    assert "has some of these figures" in capsys.readouterr().err
    assert Results.load(out) == both
