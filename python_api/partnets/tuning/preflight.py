"""Preflight: training steps on copies, which raise errors before the search."""

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

# Number of steps, and of examples in each, in which a setting must have an effect.
STEPS, EXAMPLES = 3, 16


def try_steps(problem: Problem, planned: Plan) -> Problem:
    """Take a step of each kind, with the smallest batch of the search, on a copy of the network, and deploy it.

    Returns:
        The problem, without dropout rates of modules that the network does not use.

    Raises:
        ValueError: a step fails for these modules of hyper, network, loss and optimizer; or a setting has no effect.
    """
    size = planned.member_batch if problem.settings else planned.confirm_batch
    untuned = [setting.position for setting in problem.settings]
    options = {"batch_size": size, "steps": 1, "seed": 0, "learns": bool(problem.direct), "unseen": planned.unseen}
    try:
        training = Training(problem, untuned, **options)
        with warnings.catch_warnings():
            # A single step makes no predictions.
            warnings.filterwarnings("ignore", "running statistics of .* are older than the weights")
            training.run(1)
            training.deployed()
        return _without_unused(problem)
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        # Drawn in the same way as in training, which may run user code.
        batch = problem.chunks.sample(1, max(1, int(size)), torch.Generator().manual_seed(0))
        cure = "Pass a network, a loss and modules of hyper that take these data."
        if any(isinstance(module, Augmentation) for module in problem.network.modules()):
            cure = "Augmentations take images [n, channels, height, width]; leave them out of hyper for other data."
        raise ValueError(
            f"the first training step fails: {str(error).rstrip('.')}.{described(batch)} {cure}"
        ) from error


def _without_unused(problem: Problem) -> Problem:
    """Return the problem without settings that have no effect.

    Raises:
        ValueError: a setting without effect is not one of several dropout rates.
    """
    # At middle values, as numbers of one module may need each other, such as the number and the length of holes.
    middle = [0.5] * len(problem.settings)
    before, unused = _trained(problem, middle), []
    for i, setting in enumerate(problem.settings):
        if setting.name == "weight_decay":  # the optimizer has it, and its effect may be too small in a few steps
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
    """Return a network's weights after a few steps, and their last gradients, as small steps may be rounded away."""
    problem = dataclasses.replace(problem, scheduler=None)  # a scheduler may start at a rate of 0
    size = min(EXAMPLES, problem.batch_size, problem.chunks.sizes[0])
    options = {"batch_size": size, "steps": STEPS + 1, "seed": 0, "unseen": 1, "judgements": 1, "masked": True}
    training = Training(problem, positions, **options)
    training.run(STEPS)
    weights = list(parameters_of(training.optimizer))
    return [weight.detach() for weight in weights] + [weight.grad for weight in weights if weight.grad is not None]
