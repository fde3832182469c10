"""Preflight: training steps on copies, so that errors come before the search."""

from __future__ import annotations

import dataclasses
import warnings

import torch

from partnets.hyper.augmentation import Augmentation
from partnets.training.step import parameters_of
from partnets.tuning.problem import Problem, rates
from partnets.tuning.search import Plan
from partnets.tuning.training import Training
from partnets.utils.targets import described

# Steps and examples by which a setting must change something.
STEPS, EXAMPLES = 3, 16


def try_steps(problem: Problem, planned: Plan) -> Problem:
    """Take a step of each kind, with the smallest batch of the search, on a copy of the network, and deploy it.

    Returns:
        The problem, without dropout rates of modules that the network does not use.

    Raises:
        ValueError: modules of hyper, the network, the loss or the optimizer do not take it; or a setting changes
            nothing.
    """
    size = planned.member_batch if problem.settings else planned.confirm_batch
    untuned = [setting.position for setting in problem.settings]
    options = {"batch_size": size, "steps": 1, "seed": 0, "learns": bool(problem.direct), "unseen": planned.unseen}
    try:
        training = Training(problem, untuned, **options)
        with warnings.catch_warnings():
            # Of a single step nobody predicts.
            warnings.filterwarnings("ignore", "running statistics of .* are older than the weights")
            training.run(1)
            training.deployed()
        return _without_unused(problem)
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        # Drawn from the data as the trainings draw, which may run code of the user's.
        batch = problem.chunks.sample(1, max(1, int(size)), torch.Generator().manual_seed(0))
        cure = "Pass a network, a loss and modules of hyper that take these data."
        if any(isinstance(module, Augmentation) for module in problem.network.modules()):
            cure = "Augmentations take images [n, channels, height, width]; leave them out of hyper for other data."
        raise ValueError(
            f"the first training step fails: {str(error).rstrip('.')}.{described(batch)} {cure}"
        ) from error


def _without_unused(problem: Problem) -> Problem:
    """Return the problem without settings that change nothing.

    Raises:
        ValueError: these are more than some of several dropout rates.
    """
    # Numbers of one module may need each other, as the number of holes and their length.
    middle = [0.5] * len(problem.settings)
    before, unused = _trained(problem, middle), []
    for i, setting in enumerate(problem.settings):
        if setting.name == "weight_decay":  # which the optimizer has, and which may be too small to see in a few steps
            continue
        if setting.name == "learning_rate" and problem.scheduler is not None:
            if _scheduled(problem, middle) == _scheduled(problem, [*middle[:i], 0.0, *middle[i + 1 :]]):
                raise ValueError(
                    "learning_rate changes nothing, as the scheduler sets it; leave it out of hyper, or pass a"
                    " scheduler that scales the rate of the optimizer."
                )
            continue
        after = _trained(problem, [*middle[:i], 0.0, *middle[i + 1 :]])
        if all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            unused.append(setting)
    kept = [setting for setting in problem.settings if setting not in unused]
    of_all = [setting for setting in unused if setting.group != "dropout"]
    if of_all or (unused and not any(setting.group == "dropout" for setting in kept)):
        raise ValueError(
            f"{', '.join(setting.name for setting in unused)} changes nothing in {STEPS} training steps; leave it out"
            " of hyper, or put its module where the network, the loss or the optimizer uses it."
        )
    return dataclasses.replace(problem, settings=kept)


def _scheduled(problem: Problem, positions: list[float]) -> list[list[float]]:
    """Return the learning rates of all steps."""
    training = Training(dataclasses.replace(problem, scheduler=None), positions, batch_size=1, steps=1, seed=0)
    return rates(problem.scheduler(training.optimizer), problem.steps)


def _trained(problem: Problem, positions: list[float]) -> list[torch.Tensor]:
    """Return the weights of a network after a few steps, and their last gradients: small steps may be rounded away."""
    problem = dataclasses.replace(problem, scheduler=None)  # which may begin with a rate of 0
    size = min(EXAMPLES, problem.batch_size, problem.chunks.sizes[0])
    training = Training(problem, positions, batch_size=size, steps=STEPS + 1, seed=0, unseen=1, judgements=1)
    training.run(STEPS)
    weights = list(parameters_of(training.optimizer))
    return [weight.detach() for weight in weights] + [weight.grad for weight in weights if weight.grad is not None]
