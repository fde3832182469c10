"""Runs an experiment, and says what of the paper it shows.

    python -m partbench.paper augmentation                     # three seeds on scikit-learn's digits
    python -m partbench.paper augmentation --quick             # a minute
    python -m partbench.paper augmentation --dataset cifar10   # from PARTNETS_DATA or ./data; see partnets.data
    python -m partbench.paper augmentation --dataset cifar10 --device cuda --only method=partitioned
    python -m partbench.paper all --quick                      # every experiment, on its first data set
    python -m partbench.paper page                             # docs/paper and its pictures anew, without training

Every training is kept when it is done, and a long one has checkpoints: the same command goes on after an interruption.
What the file of results in the folder --out has is not trained again: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from partbench.paper import report
from partbench.paper.experiment import EXPERIMENTS, Experiment, Record
from partbench.paper.runs import path_of, restore, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m partbench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name in ("all", *EXPERIMENTS):
        chosen = [experiment for experiment in EXPERIMENTS.values() if name in ("all", experiment.name)]
        about = "every experiment" if name == "all" else f"{chosen[0].paper}: {chosen[0].__doc__.splitlines()[0]}"
        command = commands.add_parser(name, help=about)
        if name != "all":
            command.add_argument("--dataset", choices=chosen[0].datasets, help="by default the first")
        command.add_argument("--quick", action="store_true", help="few and short trainings")
        command.add_argument("--seeds", type=_ints, help="as in 0,1,2, which is the default; 0 if quick")
        command.add_argument("--jobs", type=int, default=1, help="trainings at once")
        command.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all trainings together")
        command.add_argument("--device", default="cpu", help="of the networks; cuda has not been tried")
        command.add_argument("--bfloat16", action="store_true", help="autocast, and channels last")
        command.add_argument(
            "--only", action="append", default=[], metavar="NAME=VALUE", help="of a training's settings"
        )
        command.add_argument("--finished", action="store_true", help="of the trainings that are done; without more")
        command.add_argument("--out", type=Path, default=Path("out/paper"), help="the folder of results")
        command.set_defaults(run=_run, experiments=chosen, dataset=None)
    command = commands.add_parser("page", help="writes committed results into the documentation, and draws them anew")
    command.add_argument("--results", type=Path, default=report.RESULTS)
    command.add_argument("--index", type=Path, default=report.INDEX, help="pages are in the folder of its name")
    command.set_defaults(run=_page)
    given = parser.parse_args(arguments)
    return given.run(given)


def _run(given: argparse.Namespace) -> int:
    torch.set_num_threads(given.threads)
    for experiment in given.experiments:
        _run_one(experiment, given.dataset or experiment.datasets[0], given)
    return 0


def _run_one(experiment: Experiment, dataset: str, given: argparse.Namespace) -> None:
    seeds = given.seeds or ((0,) if given.quick else (0, 1, 2))
    kind = "-quick" * given.quick + "-bfloat16" * given.bfloat16
    path = given.out / f"{experiment.name}-{dataset}{kind}.json"
    folder = path.with_suffix(".runs")

    def settings_of(seeds: Sequence[int]) -> list[Record]:
        made = experiment.settings(dataset, seeds, given.quick)
        return [setting | {"bfloat16": True} for setting in made] if given.bfloat16 else made

    settings = settings_of(seeds)
    if path.exists():
        records = report.Report.load(path).records
        restore(folder, settings_of(sorted({record["seed"] for record in records})), records)
    for name, value in (only.split("=") for only in given.only):
        settings = [setting for setting in settings if str(setting[name]) == value]
    if given.finished:
        settings = [setting for setting in settings if path_of(folder, setting).exists()]
    records = run(experiment, settings, folder, jobs=given.jobs, device=given.device)
    command = ["python", "-m", "partbench.paper", experiment.name, "--dataset", dataset]
    command += ["--quick"] * given.quick + ["--bfloat16"] * given.bfloat16 + ["--seeds", ",".join(map(str, seeds))]
    command += [word for only in given.only for word in ("--only", only)]
    made = report.Report(experiment.name, dataset, shlex.join(command), records)
    made.save(path)
    made.draw(path)
    print(made.text())


def _page(given: argparse.Namespace) -> int:
    if missing := [str(path) for path in (given.index, given.results) if not path.exists()]:
        sys.exit(f"There is no {' and no '.join(missing)}; run this in the root of a checkout, or pass your own.")
    for page in report.pages(given.index):
        page.write_text(report.filled(page.read_text(), given.results))
    for path in given.results.glob("*.json"):
        report.Report.load(path).draw(path)
    print(f"{given.index} and its pages have the tables of {given.results}, whose pictures are drawn anew.")
    return 0


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
