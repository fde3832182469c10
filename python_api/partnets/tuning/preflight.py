"""Preflight: training steps on copies, which raise errors before the search."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from partnets.data.batch import CHANNELS_LAST, described, has_channels_last
from partnets.hyper.augmentation import Augmentation
from partnets.training.step import parameters_of
from partnets.tuning.problem import Problem, rates
from partnets.tuning.search import Plan
from partnets.tuning.training import Training
from partnets.utils.random_state import preserved

# Number of steps, and of examples in each, in which a setting must have an effect.
STEPS, EXAMPLES = 3, 16
# The norm to which gradients are clipped if they should keep theirs, as clipping also clears those of other partitions.
LARGE = 1e9


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
        if training.augmenting:
            _check_layout(problem)
        training.warn_of_knowledge()
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


def _check_layout(problem: Problem) -> None:
    """Raise ValueError if augmentations would move rows and channels of images."""
    with preserved(problem.device):  # data sets may draw from the random states too
        batch = problem.chunks.sample(1, 2, torch.Generator().manual_seed(0))
    if isinstance(batch, tuple | list) and has_channels_last(batch[0]):
        raise ValueError(
            f"x is {list(batch[0].shape)}, and augmentations take images [n, channels, height, width]. {CHANNELS_LAST}"
        )


def _without_unused(problem: Problem) -> Problem:
    """Return the problem without dropout rates that have no effect; raise for other settings without effect."""
    # At middle values, as numbers of one module may need each other, such as the number and the length of holes.
    middle = [0.5] * len(problem.settings)
    before, unused = _trained(problem, middle), []
    for i, setting in enumerate(problem.settings):
        if setting.name == "weight_decay":  # the optimizer has it, and its effect may be too small in a few steps
            continue
        changed = [*middle[:i], 0.0, *middle[i + 1 :]]
        if setting.name == "learning_rate" and problem.scheduler is not None:
            if _scheduled(problem, middle) == _scheduled(problem, changed):
                raise ValueError(
                    "learning_rate changes nothing, as the scheduler sets it; leave it out of hyper, or pass a"
                    " scheduler that scales the rate of the optimizer."
                )
        elif all(map(torch.equal, before, _trained(problem, changed))):
            unused.append(setting)
    kept = [setting for setting in problem.settings if setting not in unused]
    others = [setting for setting in unused if setting.group != "dropout"]
    if others or (unused and not any(setting.group == "dropout" for setting in kept)):
        raise ValueError(
            f"{', '.join(setting.name for setting in unused)} changes nothing in {STEPS} training steps; leave it out"
            " of hyper, or put its module where the network, the loss or the optimizer uses it."
        )
    return dataclasses.replace(problem, settings=kept)


def _scheduled(problem: Problem, positions: list[float]) -> list[list[float]]:
    """Return the learning rates of all steps."""
    training = Training(dataclasses.replace(problem, scheduler=None), positions, batch_size=1, steps=1, seed=0)
    return rates(problem.scheduler(training.optimizer), problem.steps)


def _trained(problem: Problem, positions: list[float]) -> list[Tensor]:
    """Return a network's weights after a few steps, and their last gradients, as small steps may be rounded away."""
    # A scheduler may start at a rate of 0.
    problem = dataclasses.replace(problem, scheduler=None, clip=problem.clip or LARGE)
    size = min(EXAMPLES, problem.batch_size, problem.chunks.sizes[0])
    options = {"batch_size": size, "steps": STEPS + 1, "seed": 0, "unseen": 1, "judgements": 1}
    training = Training(problem, positions, **options)
    training.run(STEPS)
    weights = list(parameters_of(training.optimizer))
    return [weight.detach() for weight in weights] + [weight.grad for weight in weights if weight.grad is not None]


def signature(problem: Problem) -> Tensor:
    """Return the norms of weights and gradients after a few steps, which identify the code of network and functions.

    The result is empty if they differ between two calls, such as by random numbers of a data set's own generator.
    """
    positions = [0.5] * len(problem.settings)
    once, again = (torch.stack([one.double().norm().cpu() for one in _trained(problem, positions)]) for _ in range(2))
    return once if is_same(once, again) else once[:0]


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two signatures are equal up to rounding on another device."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, equal_nan=True)
