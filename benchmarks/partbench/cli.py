"""The command line: python -m partbench speed|memory|step|optim|all|report|bars|compare."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from partbench import bars, compare
from partbench.measuring import machine
from partbench.measuring.estimates import SMALLEST_CHANGE
from partbench.peers.layer import DEFAULTS, Partitioning
from partbench.peers.operators import obstacles
from partbench.presets import COMPILED, PRESETS, WORKS, Conv2d, Linear
from partbench.report import page, readme
from partbench.results import Record, Results, merged
from partbench.suites import SUITES, measure
from partbench.suites.options import Options, default_backends
from partkernels.arguments import sizes
from partkernels.backend.dispatch import backends

# C for each choice of --bits: the most that fit, except for 8, where the peers' ids must fit in a byte as well.
COUNTS = {1: 2, 2: 4, 4: 16, 8: 32}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.half)
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 1 if a figure was refused, a peer failed, or `compare` found something worse."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted; the file has what was measured so far.\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m partbench", description="Speed and memory against peers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about in {**{name: suite.ABOUT for name, suite in SUITES.items()}, "all": "all of these"}.items():
        _add_measuring(commands.add_parser(name, help=about, description=about), name)

    report = commands.add_parser("report", help="a page for one or several files of results")
    report.add_argument("results", nargs="+", type=Path)
    report.add_argument("--out", type=Path, default=Path("out/benchmarks.html"), help="the page")
    report.add_argument("--readme", type=Path, help="a file with benchmark tables to update")
    report.set_defaults(run=_report)

    held = commands.add_parser("bars", help="what the kernels are held to, and what files of results say")
    held.add_argument("results", nargs="+", type=Path)
    held.set_defaults(run=lambda given: print(bars.table([Results.load(path) for path in given.results])) or 0)

    both = commands.add_parser("compare", help="what changed from one file of results to another, beyond noise")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    both.add_argument("--smallest", type=float, default=SMALLEST_CHANGE, help="least change of a ratio, as in 0.05")
    both.set_defaults(run=_compare)
    return parser


def _add_measuring(parser: argparse.ArgumentParser, suite: str) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    ours = "ours, as in cpu,reference; by default all that are ready and no reference"
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="quick", help=f"what to measure, and how long. {presets}")
    add("--out", type=Path, help="the results; by default out/SUITE.json")
    add("--add", action="store_true", help="keep the other figures that are in there, of the same circumstances")
    add("--device", help="cpu or cuda; by default the preset's")
    add("--threads", type=_count, default=torch.get_num_threads(), help="of the CPU's operators")
    add("--backends", type=_some_of(backends()), help=ours)
    add("--proportions", type=_floats, action="append", help="of the partitions, as in .8,.1,.1; repeatable")
    add("--bits", type=_ints, help="instead of proportions: equal partitions, a map of 1, 2, 4 or 8 bits")
    add("--defaults", choices=DEFAULTS, default="uniform", help="values of inactive weights")
    add("--passes", type=_count, help="over all cases; 6 give intervals of 97 %%")
    add("--minutes", type=_minutes, help="no pass begins after them")
    add("--commit", help="of the library, if this is no git checkout")
    convolution = "as in 200x20x14x14,50x20x5x5,padding=2; also stride, dilation, groups"
    others = argparse.ArgumentParser(add_help=False)  # options of other suites, which this one would ignore
    add = (parser if suite in ("speed", "all") else others).add_argument_group("layers (speed)").add_argument
    add("--linear", type=_linear, action="append", metavar="MxNxK", help="as in 256x1024x1024")
    add("--conv2d", type=_conv2d, action="append", metavar="X,WEIGHT[,name=value]", help=convolution)
    add("--operator", choices=("linear", "conv2d"), help="of the preset's layers, these alone")
    add("--dtypes", type=_some_of(DTYPES), help="as in float32,bfloat16")
    add("--active", type=_ints, help="active subnetworks, such as 1,2,3")
    add("--works", type=_some_of(WORKS), help=f"of {','.join(WORKS)}")
    add("--compiled", action=argparse.BooleanOptionalAction, help="torch.compile among the peers")
    add = (parser if suite != "speed" else others).add_argument_group("models (memory, step, optim)").add_argument
    add("--model", action="append", help="a name of partbench.peers.models, or package.module:function")
    add("--input", type=_ints, help="of one example, as in 3,32,32")
    add("--classes", type=_count)
    add("--batch", type=_count, default=64)
    add("--samples", type=_count, default=1, help="of the augmentation (step)")
    parser.set_defaults(**vars(others.parse_args([])), run=_measure, suite=suite)


def _some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of known names separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is unknown; pass some of {', '.join(known)}")
        return names

    return read


def _ints(text: str) -> tuple[int, ...]:
    return tuple(_positive(part, text, "positive integers separated by commas, as in 1,2") for part in text.split(","))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _count(text: str) -> int:
    return _positive(text, text, "a positive integer")


def _minutes(text: str) -> float:
    if not 0 < (minutes := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; pass a positive number")
    return minutes


def _sizes(text: str, count: int, example: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) != count:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} sizes; pass {count}, {example}")
    return tuple(_positive(part, text, example) for part in parts)


def _positive(part: str, text: str, expected: str) -> int:
    if not part.isdecimal() or int(part) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has {part!r}; pass {expected}")
    return int(part)


def _linear(text: str) -> Linear:
    return _sizes(text, 3, "MxNxK as in 256x1024x1024")


def _conv2d(text: str) -> Conv2d:
    example = "as in 200x20x14x14,50x20x5x5,padding=2"
    x, weight, *pairs = (text if "," in text else f"{text},").split(",")
    geometry = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        if name not in ("stride", "padding", "dilation", "groups"):
            raise argparse.ArgumentTypeError(f"{text!r} has {name!r}; known are stride, padding, dilation and groups")
        geometry[name] = 0 if (name, value) == ("padding", "0") else _positive(value, text, example)
    found = _sizes(x, 4, example), _sizes(weight, 4, example), geometry
    try:
        F.conv2d(*(torch.empty(sizes, device="meta") for sizes in found[:2]), **geometry)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no convolution: {error}") from error
    return found


def options(given: argparse.Namespace) -> Options:
    """Return the options of a command line: a preset with the given values in place of its own.

    Raises:
        ValueError: a value is invalid or not available on this machine.
    """
    preset = PRESETS[given.preset]
    changed = {"actives": given.active, "dtypes": given.dtypes and tuple(DTYPES[name] for name in given.dtypes)}
    changed |= {"works": given.works, "compiled": {None: None, True: COMPILED, False: ()}[given.compiled]}
    if given.linear or given.conv2d:
        changed |= {"linear": tuple(given.linear or ()), "conv2d": tuple(given.conv2d or ())}
    elif given.operator:
        changed |= {"linear": (), "conv2d": ()} | {given.operator: getattr(preset, given.operator)}
    if models := given.model:
        changed |= {"memory": [(m, given.batch) for m in models], "arithmetic": ()}
        changed |= {"step": [(m, given.batch, given.samples) for m in models], "optim": models}
    limits = {name: value for name in ("passes", "minutes") if (value := getattr(given, name)) is not None}
    changed |= {name: dataclasses.replace(getattr(preset, name), **limits) for name in ("plan", "step_plan")}
    preset = dataclasses.replace(preset, **{name: value for name, value in changed.items() if value is not None})
    device = torch.device(given.device or preset.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; pass --device cpu, or a preset for it: quick, full.")
    if given.bits:
        if wrong := set(given.bits) - set(COUNTS):
            raise ValueError(f"--bits has {wrong.pop()}; pass some of 1,2,4,8.")
        proportions = [(1 / COUNTS[bits],) * COUNTS[bits] for bits in given.bits]
    else:
        proportions = given.proportions or [Partitioning().proportions]
    names = given.backends or default_backends(device)
    for name in names:
        if name in obstacles():
            raise ValueError(f"the backend {name!r} cannot run here: {obstacles()[name]}.")
    for each in proportions:
        sizes(0, each)  # raises if they are invalid
    largest = max(map(len, proportions))
    if given.active and max(given.active) > largest:
        raise ValueError(f"--active has {max(given.active)}, but there are {largest} partitions; pass 1..{largest}.")
    partitionings = tuple(Partitioning(each, given.defaults) for each in proportions)
    chosen = Options(preset, device, given.threads, partitionings, names, given.input, given.classes)
    for name in {name for name, *_ in (*preset.memory, *preset.step)}.union(preset.optim):
        chosen.model(name)
    return chosen


def _measure(given: argparse.Namespace) -> int:
    chosen = options(given)
    torch.set_num_threads(chosen.threads)
    preset, (commit, modified) = chosen.preset, machine.commit()
    settings = {"preset": given.preset, "device": chosen.device.type, "threads": chosen.threads}
    settings |= {"passes": preset.plan.passes, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "")}
    results = Results(
        command=shlex.join(["python", "-m", "partbench", *sys.argv[1:]]),
        commit=given.commit or commit,
        modified=modified,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine.machine(chosen.device),
        versions=machine.versions(),
        settings=settings,
        rooflines=machine.rooflines(chosen.device, preset.dtypes, chosen.kernel_clock(), scale=preset.scale),
    )
    out = given.out or Path("out") / f"{given.suite}.json"
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; pass the path of a file.")
    kept = [Results.load(out)] if given.add and out.exists() else []

    def save(records: list[Record]) -> None:
        results.records = records
        runs = merged([*kept, results])
        if len(runs) > 1:
            raise ValueError(f"{out} has some of these figures, or ones of other circumstances; pass another --out.")
        runs[0].save(out)

    save(measure(list(SUITES) if given.suite == "all" else [given.suite], chosen, save=save))
    problems = [record for record in results.records if record.problem in ("refused", "failed")]
    for record in problems:
        print(f"{record.label}: {record.refused or record.missing}", file=sys.stderr)
    print(f"{len(results.records)} figures, {len(problems)} of them refused or failed, are in {out}.")
    print(f"python -m partbench report {out}   makes a page of them.")
    return 1 if problems else 0


def _report(given: argparse.Namespace) -> int:
    results = merged(Results.load(path) for path in given.results)
    if given.out.resolve() in {each.resolve() for each in given.results}:
        raise ValueError(
            f"--out {given.out} is one of the files of results, which the page would replace; pass another."
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page(results))
    print(f"The page is {given.out}.")
    if given.readme:
        readme.write(given.readme, results)
        print(f"{given.readme} has its tables.")
    return 0


def _compare(given: argparse.Namespace) -> int:
    before, after = Results.load(given.before), Results.load(given.after)
    found = compare.changes(before, after, given.smallest)
    if not any(change.comparable for change in found):
        raise ValueError(
            f"{given.before} and {given.after} have no figure in common that can be compared; measure the same work in"
            " both, with two passes or more."
        )
    print(compare.text(before, after, found))
    return 1 if any(change.worse for change in found) else 0
