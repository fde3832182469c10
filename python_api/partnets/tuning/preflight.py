"""Preflight: a training step on a copy, so that errors come before the search."""

from __future__ import annotations

import torch

from partnets.hyper.augmentation import Augmentation
from partnets.tuning.problem import Problem
from partnets.tuning.search import Plan
from partnets.tuning.training import Training
from partnets.utils.targets import described


def try_step(problem: Problem, planned: Plan) -> None:
    """Take a step of each kind, with the smallest batch of the search, on a copy of the network, and deploy it.

    Raises:
        ValueError: modules of hyper, the network, the loss or the optimizer do not take it.
    """
    size = planned.member_batch if problem.settings else planned.confirm_batch
    untuned = [setting.position for setting in problem.settings]
    options = {"batch_size": size, "steps": 1, "seed": 0, "learns": bool(problem.direct), "unseen": 1}
    try:
        training = Training(problem, untuned, **options)
        training.run(1)
        training.deployed()
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        batch = problem.chunks.sample(1, max(1, int(size)), torch.Generator().manual_seed(0))
        cure = "Pass a network, a loss and modules of hyper that take these data."
        if any(isinstance(module, Augmentation) for module in problem.network.modules()):
            cure = "Augmentations take images [n, channels, height, width]; leave them out of hyper for other data."
        raise ValueError(
            f"the first training step fails: {str(error).rstrip('.')}.{described(batch)} {cure}"
        ) from error
