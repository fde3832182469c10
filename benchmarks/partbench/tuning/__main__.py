"""Regret of partnets.tune and of searches with a validation set, by problem.

usage: python -m partbench.tuning --out FILE [--data FOLDER] [--problems a,b] [--seeds 0,1,2] [--budgets 2]

Regret is (test loss - oracle's) / (untuned's - oracle's): 0 is the best of a grid by test data, 1 is an untuned
training. If tuning gains less than a twentieth of the loss, that twentieth is the divisor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from partbench.figures import markdown
from partbench.tuning.instruments import INSTRUMENTS, learned
from partbench.tuning.peers import SEARCHES, TRIALS, TRIALS_IN_SECONDS, Judge, untuned
from partbench.tuning.problems import CHOOSING, PROBLEMS, Case
from partnets.evaluation import mean_loss
from partnets.tuning import tune
from partnets.tuning.problem import Problem, make_problem
from partnets.tuning.training import Training
from partnets.utils.losses import plain, scores
from partnets.utils.seeds import derived

# Points of the oracle's grid, besides an untuned training and a guess.
GRID = 24
LEAST_GAIN = 0.05
KINDS = dict.fromkeys(("translate_x", "translate_y"), "translation")
KINDS |= dict.fromkeys(("scale", "stretch", "shear"), "deformation")
# The options of each method of ours.
CHUNKS = {
    "tune": {},
    "tune-c3": {"proportions": (0.8, 0.1, 0.1)},
    "tune-c5": {"proportions": (0.6, 0.1, 0.1, 0.1, 0.1)},
}


def problem_of(case: Case, seed: int) -> Problem:
    """Return the problem that tune makes of a case, for searches, which also search augmentations."""
    made = make_problem(case.network, case.train, case.tuned, seed=seed, **case.options)
    return dataclasses.replace(made, settings=[*made.starts, *made.settings], direct=[], starts=[])


def tested(problem: Problem, network, case: Case) -> tuple[float, float]:
    """Return the mean loss on the test data, and the accuracy or the squared error."""
    loss = mean_loss(network, case.test, plain(problem.loss), batch_size=1000)
    if problem.squared:
        return loss, loss
    right = lambda output, y: (scores(output).argmax(-1 if output.dim() > 2 else 1) == y).float()  # noqa: E731
    return loss, mean_loss(network, case.test, right, batch_size=1000)


def refit(problem: Problem, positions, case: Case, seed: int) -> tuple[float, float]:
    """Train on all data; return the test loss and score."""
    options = {"batch_size": problem.batch_size, "steps": problem.steps, "seed": seed, "everything": True}
    training = Training(problem, positions.tolist(), **options)
    try:
        training.run(problem.steps)
    except FloatingPointError:
        return float("inf"), 0.0
    return tested(problem, training.network, case)


def measured(name: str, seed: int, folder: Path | None, methods: list[str], budgets: list[float]) -> list[dict]:
    """Return a record for each method: test loss, score, cost in trainings, seconds and chosen values."""
    case = PROBLEMS[name](seed, folder)
    problem, records = problem_of(case, seed=seed), []

    def add(method: str, found: tuple[float, float], cost: float, seconds: float, values: dict) -> None:
        records.append(
            {"problem": name, "seed": seed, "method": method, "loss": found[0], "score": found[1], "cost": cost,
             "seconds": seconds, "values": values}
        )  # fmt: skip
        print(f"{name:20} {seed} {method:14} {found[0]:.4f} {found[1]:.4f} cost {cost:.2f} {seconds:.1f} s", flush=True)

    whole = problem.steps * problem.batch_size
    for method in methods:
        if method.startswith("tune"):
            continue
        kind, _, how = method.partition("-")
        start, judge = time.perf_counter(), Judge(problem, derived(seed, method), how == "batches")
        if method in INSTRUMENTS:
            positions, judge.examples = learned(case, problem, method, derived(seed, method))
        else:
            trials = TRIALS_IN_SECONDS if how == "seconds" else TRIALS
            positions = untuned(problem, judge) if method == "untuned" else SEARCHES[kind](problem, judge, trials)
        values = {s.name: s.value(float(p)) for s, p in zip(problem.settings, positions, strict=True)}
        found = refit(problem, positions, case, derived(seed, "final"))
        add(method, found, judge.examples / whole + 1, time.perf_counter() - start, values)
    for method in (method for method in methods if method.startswith("tune")):
        for budget in budgets:
            start = time.perf_counter()
            options = CHUNKS[method] | case.options
            result = tune(case.network, case.train, case.tuned, budget=budget, seed=seed, **options)
            found = tested(problem, result.model, case)
            values = dict(result.values) | {"steps": result.steps}
            add(f"{method}-{budget:g}", found, result.cost, time.perf_counter() - start, values)
    return records


def oracle(name: str, seeds: list[int], folder: Path | None) -> list[dict]:
    """Return the mean test loss over the seeds at each point of a grid."""
    records = []
    cases = [PROBLEMS[name](seed, folder) for seed in seeds]
    problems = [problem_of(case, seed=seed) for case, seed in zip(cases, seeds, strict=True)]
    count = len(problems[0].settings)
    engine = torch.quasirandom.SobolEngine(count, scramble=True, seed=1)
    grid = engine.draw(GRID)
    # In a third of the points, some settings are untuned.
    base = torch.tensor([setting.position for setting in problems[0].settings])
    off = torch.rand(GRID // 3, count, generator=torch.Generator().manual_seed(2)) < 0.5
    grid[: GRID // 3] = torch.where(off, base, grid[: GRID // 3])
    if cases[0].known:
        grid = torch.stack([_position(problems[0], base, values) for values in cases[0].known])
    for point in grid:
        found = [
            refit(problem, point, case, derived(seed, "final"))
            for problem, case, seed in zip(problems, cases, seeds, strict=True)
        ]
        values = {s.name: s.value(float(p)) for s, p in zip(problems[0].settings, point, strict=True)}
        losses, scores_ = zip(*found, strict=True)
        records.append({"problem": name, "method": "grid", "losses": losses, "scores": scores_, "values": values})
    best = min(records, key=lambda record: sum(record["losses"]))
    print(f"{name:20} grid: {sum(best['losses']) / len(seeds):.4f} at {best['values']}", flush=True)
    return records


def _position(problem: Problem, base: torch.Tensor, values: dict[str, float]) -> torch.Tensor:
    """Return the positions of values in their ranges; a kind of transformation sets all of its settings."""
    found = base.clone()
    for i, setting in enumerate(problem.settings):
        kind = KINDS.get(setting.name, "")
        if (value := values.get(setting.name, values.get(kind))) is not None:
            found[i] = (value - setting.low) / (setting.high - setting.low)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m partbench.tuning", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; what is in it already is not run again")
    parser.add_argument("--data", type=Path, help="the folder of MNIST, CIFAR-10 and WikiText-2")
    parser.add_argument("--problems", help="names, separated by commas; 'judging' are all that chose no default")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--methods",
        default="untuned,guess,sobol,random,tpe,tpe-batches,tune",
        help="searches have trials of a ninth of the steps, with -batches of a ninth of each batch, and with -seconds"
        " there are 15 of them; also direct,"
        " lookahead and stn, by which regularisers learn in one partitioned training",
    )
    parser.add_argument("--budgets", default="2")
    parser.add_argument("--no-oracle", action="store_true")
    given = parser.parse_args(arguments)
    judging = [name for name in PROBLEMS if name not in CHOOSING]
    names = judging if given.problems in (None, "judging") else given.problems.split(",")
    seeds, budgets = [int(seed) for seed in given.seeds.split(",")], [float(b) for b in given.budgets.split(",")]
    records = json.loads(given.out.read_text()) if given.out.exists() else []
    for name in names:
        known = {(r["problem"], r.get("seed"), r["method"]) for r in records}
        for seed in seeds:
            methods = [
                method for method in given.methods.split(",")
                if method.startswith("tune") or (name, seed, method) not in known
            ]  # fmt: skip
            records += measured(name, seed, given.data, methods, budgets)
            given.out.write_text(json.dumps(records, indent=1))
        if not given.no_oracle and (name, None, "grid") not in known:
            records += oracle(name, seeds, given.data)
            given.out.write_text(json.dumps(records, indent=1))
    print(table(records))
    return 0


def table(records: list[dict]) -> str:
    """Return regret by problem and method in Markdown, with means over problems that chose defaults and that judge."""
    names = list(dict.fromkeys(record["problem"] for record in records))
    methods = list(dict.fromkeys(r["method"] for r in records if r["method"] not in ("grid", "untuned")))
    rows, regrets = [], {}
    for name in names:
        mine = [record for record in records if record["problem"] == name]
        mean = {
            method: torch.tensor([r["loss"] for r in mine if r["method"] == method]).mean().item()
            for method in ["untuned", *methods]
        }
        grid = [sum(r["losses"]) / len(r["losses"]) for r in mine if r["method"] == "grid"]
        best = min([*grid, mean["untuned"], mean.get("guess", float("inf"))])
        gain = max(mean["untuned"] - best, LEAST_GAIN * abs(best))
        regrets[name] = {method: (mean[method] - best) / gain for method in methods}
        rows.append([name, f"{best:.4f}", f"{mean['untuned']:.4f}", *(f"{regrets[name][m]:.2f}" for m in methods)])
    for what, some in (("chose defaults", CHOOSING), ("judge", [n for n in names if n not in CHOOSING])):
        some = [name for name in some if name in regrets]
        if some:
            means = [sum(regrets[name][method] for name in some) / len(some) for method in methods]
            rows.append([f"mean of {len(some)} that {what}", "", "", *(f"{value:.2f}" for value in means)])
    return markdown(["problem", "oracle", "untuned", *methods], rows)


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    sys.exit(main())
