"""Single instruments: regularisers that learn in one partitioned training, instead of partnets.tune."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import torch
from torch import Tensor, nn

import partnets
from partbench.tuning.problems import Case
from partnets import hyper, stn
from partnets.hyper import hyperparameters
from partnets.tuning.problem import Problem
from partnets.tuning.training import partitioned_optimizer

INSTRUMENTS = {"direct": "direct", "lookahead": partnets.Lookahead(steps=1), "stn": None}
PROPORTIONS = (0.8, 0.1, 0.1)
START = {"dropout": 0.2, "weight_decay": 1e-4, "label_smoothing": 0.1}
# The learning rate of the hyperparameters, which cross a range in a fifth of a training.
RATE = 0.1


def learned(case: Case, problem: Problem, instrument: str, seed: int) -> tuple[Tensor, float]:
    """Return the learned positions after half the steps of a training, and the number of examples that it took.

    A training that diverges gives the untuned position.

    Raises:
        KeyError: the case tunes a learning rate or augmentations.
    """
    torch.manual_seed(seed)
    kind = hyper.Dropout if instrument == "stn" else hyper.ConcreteDropout
    network, drops = copy.deepcopy(case.network), {}
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.Dropout):
            name = "dropout" if "dropout:one" in case.tuned else f"dropout.{path}"
            network.set_submodule(path, drops.setdefault(name, kind(START["dropout"])))
    decay, smoothing = hyper.WeightDecay(network, START["weight_decay"]), hyper.LabelSmoothing(START["label_smoothing"])
    found = {**drops, "weight_decay": decay, "label_smoothing": smoothing}
    psi = [found[setting.name] for setting in problem.settings]
    model = nn.Sequential(network, *(module for module in (decay, smoothing) if module in psi))
    # Regularisers of the training loss have no direct gradient, and keep their initial values.
    learns = list(drops.values()) if instrument == "direct" else psi
    options = {"hyper": learns, "batch_size": case.batch_size, "clip": case.clip, "seed": seed}
    options["loss"] = smoothing if smoothing in psi else problem.loss
    if instrument == "stn":
        stn.convert(model, psi)
    model = partnets.partition(model, PROPORTIONS, defaults="stored", seed=seed)
    chunks = partnets.chunk(case.train, PROPORTIONS, seed=seed)
    options["optimizer"] = partitioned_optimizer(case.optimizer, model)
    trainer, parameters = partnets.Trainer, [p for module in learns for p in module.parameters()]
    if instrument == "stn":
        trainer, parameters = stn.Trainer, [*{*hyperparameters(model), *parameters}]
    else:
        options["hyper_gradient"] = INSTRUMENTS[instrument]
    options["hyper_optimizer"] = torch.optim.Adam(parameters, lr=RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that dropout should not learn directly
        try:
            trainer(model, chunks, **options).fit(case.steps // 2)
        except FloatingPointError:
            return torch.tensor([setting.position for setting in problem.settings]), float(case.steps * case.batch_size)
    values = [next(iter(module.values().values())) for module in psi]
    named = zip(problem.settings, values, strict=True)
    positions = [dataclasses.replace(setting, untuned=value).position for setting, value in named]
    return torch.tensor(positions), float(case.steps * case.batch_size)
