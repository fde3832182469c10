"""A command that runs experiments and reports which of the paper's claims they show.

    python -m partbench.paper augmentation                     # three seeds on scikit-learn's digits
    python -m partbench.paper augmentation --quick             # a minute
    python -m partbench.paper augmentation --dataset cifar10   # from PARTNETS_DATA or ./data; see partbench.datasets
    python -m partbench.paper augmentation --dataset cifar10 --device cuda --only method=partitioned
    python -m partbench.paper all --quick                      # every experiment, on its first data set
    python -m partbench.paper page                             # update docs/paper and its pictures, without training

Every training is kept when it is done, and a long one has checkpoints, so the same command continues after an
interruption. Trainings in the results file in the folder --out are not repeated either. To start again, delete that
file and the folder .runs beside it.
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
from partbench.paper.runs import finished, restore, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m partbench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name in ("all", *EXPERIMENTS):
        chosen = [experiment for experiment in EXPERIMENTS.values() if name in ("all", experiment.name)]
        about = "every experiment" if name == "all" else f"{chosen[0].paper}: {chosen[0].__doc__.splitlines()[0]}"
        command = commands.add_parser(name, help=about.replace("%", "%%"))
        if name != "all":
            command.add_argument("--dataset", choices=chosen[0].datasets, help="by default the first")
        command.add_argument("--quick", action="store_true", help="few and short trainings")
        command.add_argument("--seeds", type=_seeds, help="as in 0,1,2, which is the default; 0 if quick")
        command.add_argument("--jobs", type=_number, default=1, help="trainings at once")
        command.add_argument(
            "--threads", type=_number, default=torch.get_num_threads(), help="of all trainings together"
        )
        command.add_argument("--device", default="cpu", help="of the networks; cuda has not been tried")
        command.add_argument("--bfloat16", action="store_true", help="autocast, and channels_last; not partnets.tune")
        command.add_argument(
            "--only", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="train these settings only"
        )
        command.add_argument("--finished", action="store_true", help="train nothing, and report what is done")
        command.add_argument("--out", type=Path, default=Path("out/paper"), help="the folder of results")
        command.set_defaults(run=_run, experiments=chosen, dataset=None)
    command = commands.add_parser("page", help="write committed results into the docs and redraw their pictures")
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
    kind = "-quick" * given.quick + "-bfloat16" * given.bfloat16
    path = given.out / f"{experiment.name}-{dataset}{kind}.json"
    folder = path.with_suffix(".runs")

    def settings_of(seeds: Sequence[int]) -> list[Record]:
        made = experiment.settings(dataset, seeds, given.quick)
        return [setting | {"bfloat16": True} for setting in made] if given.bfloat16 else made

    seeds = given.seeds or ((0,) if given.quick else (0, 1, 2))
    chosen = _chosen(settings_of(seeds), given.only)
    records = report.Report.load(path).records if path.exists() else []
    every = settings_of(sorted({*seeds, *(record["seed"] for record in records)}))
    restore(folder, every, records, path)
    if not given.finished:
        run(experiment, chosen, folder, jobs=given.jobs, device=given.device)
    # Earlier trainings are kept, whatever was requested now.
    records = finished(folder, every)
    if not records:
        sys.exit(f"{folder} has no finished training; leave out --finished.")
    command = ["python", "-m", "partbench.paper", experiment.name, "--dataset", dataset]
    command += ["--quick"] * given.quick + ["--bfloat16"] * given.bfloat16
    command += ["--seeds", ",".join(map(str, sorted({record["seed"] for record in records})))]
    made = report.Report(experiment.name, dataset, shlex.join(command), records)
    made.save(path)
    if len(records) < len(every) and not experiment.partial_results:
        sys.exit(f"{len(records)} of {len(every)} trainings are finished; the table and the picture need all of them.")
    made.draw(path)
    print(made.text())


def _chosen(settings: list[Record], only: Sequence[tuple[str, str]]) -> list[Record]:
    """Return the settings that have these values; exit with a message if no setting has them."""
    for name, value in only:
        if name not in settings[0]:
            sys.exit(f"there is no setting {name!r}; pass one of {', '.join(settings[0])}.")
        values = dict.fromkeys(str(setting[name]) for setting in settings)
        settings = [setting for setting in settings if str(setting[name]) == value]
        if not settings:
            sys.exit(f"no training has {name}={value}; pass one of {', '.join(values)}.")
    return settings


def _page(given: argparse.Namespace) -> int:
    if missing := [str(path) for path in (given.index, given.results) if not path.exists()]:
        sys.exit(f"There is no {' and no '.join(missing)}; run this in the root of a checkout, or pass your own.")
    for page in report.pages(given.index):
        page.write_text(report.filled(page.read_text(), given.results))
    for path in given.results.glob("*.json"):
        report.Report.load(path).draw(path)
    print(f"{given.index} and its pages have the tables of {given.results}; its pictures are redrawn.")
    return 0


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} has a negative or a repeated seed; pass different numbers from 0")
    return seeds


def _setting(text: str) -> tuple[str, str]:
    name, is_one, value = text.partition("=")
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def _number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1; pass 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
