"""The command line: python -m benchmarks speed|memory|step|optim|all|report|compare."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import sys
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.estimates import SMALLEST_CHANGE
from benchmarks.layer import DEFAULTS, Division
from benchmarks.operators import obstacles
from benchmarks.presets import PRESETS, Conv2d, Linear
from benchmarks.registry import SUITES, Options, default_backends, kernel_clock, measure
from benchmarks.results import Record, Results
from benchmarks.rooflines import rooflines
from benchmarks.speed import COMPILED, WORKS
from partkernels.dispatch import backends

# The C of --bits, which fills that many bits but for 8, where a byte a weight must hold the peers' ids too.
COUNTS = {1: 2, 2: 4, 4: 16, 8: 32}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns 1 if a figure was refused, a peer failed, or `compare` found something slower."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed and memory against peers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about in {**{name: suite.about for name, suite in SUITES.items()}, "all": "all of these"}.items():
        _add_measuring(commands.add_parser(name, help=about, description=about), name)

    report = commands.add_parser("report", help="a page for one or several files of results")
    report.add_argument("results", nargs="+", type=Path)
    report.add_argument("--out", type=Path, default=Path("out/benchmarks.html"), help="the page")
    report.add_argument("--readme", type=Path, help="a file whose benchmark tables are written anew")
    report.set_defaults(run=_report)

    compare = commands.add_parser("compare", help="what changed from one file of results to another, beyond noise")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--out", type=Path, help="a page of both, with the changes marked")
    compare.add_argument("--smallest", type=float, default=SMALLEST_CHANGE, help="least change of a ratio, as in 0.05")
    compare.set_defaults(run=_compare)
    return parser


def _add_measuring(parser: argparse.ArgumentParser, suite: str) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="quick", help=f"what to measure, and how long. {presets}")
    add("--out", type=Path, help="the results; by default out/SUITE.json")
    add("--device", help="cpu or cuda; by default the preset's")
    add("--threads", type=int, default=torch.get_num_threads(), help="of the CPU's operators")
    add("--backends", type=_names, help="ours, as in cpu,reference; by default all that are ready and no reference")
    add("--proportions", type=_floats, action="append", help="of the partitions, as in .8,.1,.1; repeatable")
    add("--bits", type=_ints, help="instead of proportions: equal partitions, a map of 1, 2, 4 or 8 bits")
    add("--defaults", choices=DEFAULTS, default="uniform", help="what replaces weights that are not live")
    add("--passes", type=int, help="over all cases; 6 give intervals of 97 %%")
    add("--minutes", type=float, help="no pass begins after them")
    add("--commit", help="of the library, if this is no git checkout")
    group = parser.add_argument_group("layers (speed)")
    group.add_argument("--linear", type=_linear, action="append", metavar="MxNxK", help="as in 256x1024x1024")
    group.add_argument(
        "--conv2d",
        type=_conv2d,
        action="append",
        metavar="X,WEIGHT[,name=value]",
        help="as in 200x20x14x14,50x20x5x5,padding=2; also stride, dilation, groups",
    )
    group.add_argument("--dtypes", type=_dtypes, help="as in float32,bfloat16")
    group.add_argument("--active", type=_ints, help="live subnetworks, as in 1,2,3")
    group.add_argument("--works", type=_names, default=WORKS, help=f"of {','.join(WORKS)}")
    group.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="torch.compile among the peers")
    group = parser.add_argument_group("models (memory, step, optim)")
    group.add_argument("--model", action="append", help="a name as in benchmarks/models.py, or package.module:function")
    group.add_argument("--input", type=_ints, help="of one example, as in 3,32,32")
    group.add_argument("--classes", type=int)
    group.add_argument("--batch", type=int, default=64)
    group.add_argument("--samples", type=int, default=1, help="of the augmentation (step)")
    parser.set_defaults(run=_measure, suite=suite)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    names = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return tuple(names[name] for name in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _linear(text: str) -> Linear:
    m, n, k = _sizes(text)
    return m, n, k


def _conv2d(text: str) -> Conv2d:
    x, weight, *rest = text.split(",")
    geometry = {name: int(value) for name, value in (pair.split("=") for pair in rest)}
    if len(_sizes(x)) != 4 or len(_sizes(weight)) != 4 or geometry.keys() - {"stride", "padding", "dilation", "groups"}:
        raise ValueError
    return _sizes(x), _sizes(weight), geometry


def options(given: argparse.Namespace) -> Options:
    """What the command line asks for: a preset, and what was given instead of its choices.

    Raises:
        ValueError: a choice cannot be had here.
    """
    preset = PRESETS[given.preset]
    changed = {"dtypes": given.dtypes, "actives": given.active}
    if given.compiled is not None:
        changed["compiled"] = COMPILED if given.compiled else ()
    if given.linear or given.conv2d:
        changed |= {"linear": tuple(given.linear or ()), "conv2d": tuple(given.conv2d or ())}
    if given.model:
        changed |= {
            "memory": tuple((name, given.batch) for name in given.model),
            "step": tuple((name, given.batch, given.samples) for name in given.model),
            "optim": tuple(given.model),
            "arithmetic": (),
            "series": False,
        }
    preset = dataclasses.replace(preset, **{name: value for name, value in changed.items() if value is not None})
    limits = {"passes": given.passes, "minutes": given.minutes}
    limits = {name: value for name, value in limits.items() if value is not None}
    preset = dataclasses.replace(
        preset,
        plan=dataclasses.replace(preset.plan, **limits),
        step_plan=dataclasses.replace(preset.step_plan, **limits),
    )
    device = torch.device(given.device or preset.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; pass --device cpu, or a preset for it: quick, full.")
    if given.bits:
        proportions = [(1 / COUNTS[bits],) * COUNTS[bits] for bits in given.bits]
    else:
        proportions = given.proportions or [Division().proportions]
    names = given.backends or default_backends(device)
    for name in names:
        if name not in backends():
            raise ValueError(f"--backends has {name!r}; known are {', '.join(backends())}.")
        if name in obstacles():
            raise ValueError(f"the backend {name!r} cannot run here: {obstacles()[name]}.")
    chosen = Options(
        preset=preset,
        device=device,
        threads=given.threads,
        divisions=tuple(Division(each, given.defaults) for each in proportions),
        backends=names,
        works=given.works,
        input=given.input,
        classes=given.classes,
    )
    for name in {name for name, *_ in (*preset.memory, *preset.step)}.union(preset.optim):
        chosen.model(name)
    return chosen


def _measure(given: argparse.Namespace) -> int:
    chosen = options(given)
    torch.set_num_threads(chosen.threads)
    names = list(SUITES) if given.suite == "all" else [given.suite]
    commit, modified = machine.commit()
    plan = chosen.preset.plan
    results = Results(
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        commit=given.commit or commit,
        modified=modified,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine.machine(chosen.device),
        versions=machine.versions(),
        settings={
            "preset": given.preset,
            "device": chosen.device.type,
            "threads": chosen.threads,
            "passes": plan.passes,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", ""),
        },
        rooflines=rooflines(chosen.device, chosen.preset.dtypes, kernel_clock(chosen), scale=chosen.preset.scale),
    )
    out = given.out or Path("out") / f"{given.suite}.json"

    def save(records: list[Record]) -> None:
        results.records = records
        results.save(out)

    save(measure(names, chosen, save=save))
    problems = [record for record in results.records if record.refused or record.missing.startswith("failed")]
    for record in problems:
        print(f"{' '.join(map(str, record.key))}: {record.refused or record.missing}", file=sys.stderr)
    print(f"{len(results.records)} figures, {len(problems)} of them refused or failed, are in {out}.")
    print(f"python -m benchmarks report {out}   makes a page of them.")
    return 1 if problems else 0


def _report(given: argparse.Namespace) -> int:
    from benchmarks import readme
    from benchmarks.report import page

    results = [Results.load(path) for path in given.results]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page(results))
    print(f"The page is {given.out}.")
    if given.readme:
        readme.write(given.readme, results)
        print(f"{given.readme} has its tables.")
    return 0


def _compare(given: argparse.Namespace) -> int:
    from benchmarks import compare

    return compare.run(given.before, given.after, out=given.out, smallest=given.smallest)
