"""Sensitivity of self-tuning to the frequency of hyperparameter updates and to the scale of perturbations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from partbench.paper.experiment import Claim, Experiment, Record, Table, registered, select, text
from partbench.paper.stn_cnn import digits_task
from partbench.paper.tuning import Tuner

METHODS = {"stn": "STN", "delta": "Δ-STN"}
# T_train : T_valid, the initial σ, and whether it learns.
USUAL = (2, 1, 0.5, True)
RATIOS = ((1, 1), (5, 1), (20, 1))
SCALES = (0.1, 0.5, 1.0, 2.0)
VARIANTS = [USUAL, *((*ratio, *USUAL[2:]) for ratio in RATIOS), *((*USUAL[:2], scale, False) for scale in SCALES)]
STEPS, QUICK_STEPS = 1000, 50
# The largest loss over that at the usual settings.
LEVEL = 1.25


@registered
class StnSensitivity(Experiment):
    """STN on rotated digits: how often λ is updated, and its noise σ, fixed or learned."""

    name = "stn-sensitivity"
    paper = "the talk's sensitivity studies"
    partial_results = True
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        return [
            {
                "method": method,
                "seed": seed,
                "steps": QUICK_STEPS if quick else STEPS,
                "every": every,
                "valid": valid,
                "scale": scale,
                "learned": learned,
            }
            for every, valid, scale, learned in VARIANTS
            for method in METHODS
            for seed in seeds
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        task = digits_task(setting["seed"], setting["steps"])
        task.hyper_every, task.hyper_steps, task.scale = setting["every"], setting["valid"], setting["scale"]
        task.options["learn_scale"] = setting["learned"]
        tuner = Tuner(task, setting["seed"], checkpoint)
        network, history = tuner.self_tuned(centred=setting["method"] == "delta")
        scales = [values[-1] for name, values in history.values.items() if name.endswith(", scale")]
        return {**tuner.judged(network), "scale_at_end": sum(scales) / len(scales)}

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for variant in VARIANTS:
            losses = []
            for method in METHODS:
                mine = _at(found, method, variant)
                losses += [text(mine.validation, 3), text(mine.test, 3), text(mine.scale_at_end, 2)]
            every, valid, scale, learned = variant
            rows.append([f"{every} : {valid}", f"{scale:g}, {'learned' if learned else 'fixed'}", *losses])
        columns = ("validation loss", "test loss", "mean σ at the end")
        return ["T_train : T_valid", "σ", *(f"{label}: {name}" for label in METHODS.values() for name in columns)], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        kinds = {
            "steps of weights for one of λ": [
                (each, each[0]) for each in sorted([USUAL, *VARIANTS[1 : 1 + len(RATIOS)]])
            ],
            "σ, fixed": [(each, each[2]) for each in VARIANTS[-len(SCALES) :]],
        }
        for axes, (label, variants) in zip(figure.subplots(1, 2, sharey=True), kinds.items(), strict=True):
            for method, name in METHODS.items():
                losses = [_at(found, method, variant).validation for variant, _ in variants]
                places = [place for _, place in variants]
                means, errors = (
                    [each.mean() for each in losses],
                    [each.sem() if len(each) > 1 else 0 for each in losses],
                )
                axes.errorbar(places, means, errors, label=name, marker=".")
            axes.set(xlabel=label, xscale="log")
        figure.axes[0].set(ylabel="validation loss")
        figure.axes[0].legend()
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for method, label in METHODS.items():
            usual = _at(found, method, USUAL).validation
            for variant in VARIANTS[1:]:
                every, valid, scale, learned = variant
                what = f"T_train : T_valid = {every} : {valid}" if learned else f"σ fixed at {scale:g}"
                ours = _at(found, method, variant).validation
                level = bool(ours.mean() <= LEVEL * usual.mean())
                claim = f"{label}, {what}: validation loss at most {LEVEL} of that at 2 : 1 with σ learned"
                claims.append(Claim(claim, f"{text(ours, 3)} and {text(usual, 3)}", level))
        return claims


def _at(found: pd.DataFrame, method: str, variant: tuple) -> pd.DataFrame:
    every, valid, scale, learned = variant
    return select(found, method=method, every=every, valid=valid, scale=scale, learned=learned)
