"""Whether an optimiser steps each entry of a tensor by itself, so that parts of it can be stepped in turn."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

# Gradients of several sizes tell what clips or normalises them; RAdam changes its rule at the sixth step.
SHAPE, GRADIENTS = (6, 4), (1.0, 100.0, 0.01, 1.0, 1.0, 100.0, 0.01, 1.0)
# A rate of 0 would hide what an optimiser does.
LR = 1e-2
# Above rounding in float64: processors sum in different orders where a tensor's size differs.
RTOL = 1e-9


def step(
    optimizer: type[torch.optim.Optimizer], tensor: Tensor, grad: Tensor, state: dict | None, settings: dict
) -> dict:
    """Steps all entries of a tensor in place, as an optimiser of this class does.

    Args:
        optimizer: the class.
        tensor, grad: of one shape; the tensor's grad is replaced.
        state: what the last call for this tensor's entries returned, None for their first step.
        settings: of the optimiser's group, by name.

    Returns:
        The new state, by name.

    Example:
        >>> x = torch.zeros(2)
        >>> state = step(torch.optim.SGD, x, torch.ones(2), None, {"lr": 0.5, "momentum": 0.9})
        >>> x, state
        (tensor([-0.5000, -0.5000]), {'momentum_buffer': tensor([1., 1.])})
    """
    tensor.grad = grad
    one = make(optimizer, tensor, settings)
    if state is not None:
        one.state[tensor] = state
    one.step()
    return one.state[tensor]


def check(optimizer: type[torch.optim.Optimizer], settings: dict, device: torch.device | None) -> dict[str, bool]:
    """Steps a small tensor as a whole and in two parts, and compares.

    Args:
        optimizer, settings: as of `step`.
        device: where it is tried; some settings, as capturable, need a GPU.

    Returns:
        For each part of the state, by name, whether it has a number for each entry; otherwise it is one number.

    Raises:
        ValueError: the parts moved otherwise than the whole, or could not be stepped; and the optimiser's own errors.

    Example:
        >>> check(torch.optim.RMSprop, {}, torch.device("cpu"))
        {'step': False, 'square_avg': True}
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64, device="cpu").to(device)

    whole, mask = draw(), draw() > 0
    masks, parts, states = (mask, ~mask), (whole[mask], whole[~mask]), [None, None]
    settings = settings | {"lr": LR}
    reference = make(optimizer, whole, settings)
    try:
        for scale in GRADIENTS:
            whole.grad = scale * draw()
            reference.step()
            states = [
                step(optimizer, part, whole.grad[mask], state, settings)
                for part, mask, state in zip(parts, masks, states, strict=True)
            ]
    except Exception as error:  # each optimiser has its own
        raise ValueError(f"{optimizer.__name__} cannot step parts of a tensor: {error}; {_CURE}") from error
    expected = reference.state[whole]
    for part, mask, state in zip(parts, masks, states, strict=True):
        same = state.keys() == expected.keys() and _is_part(part, whole, mask)
        if not same or not all(_is_part(state[name], expected[name], mask) for name in state):
            raise ValueError(f"{optimizer.__name__} moves parts of a tensor otherwise than the whole tensor; {_CURE}")
    return {name: isinstance(value, Tensor) and value.dim() > 0 for name, value in expected.items()}


_CURE = "pass one that steps each entry by itself, such as torch.optim.RMSprop."


def make(optimizer: type[torch.optim.Optimizer], tensor: Tensor, settings: dict) -> torch.optim.Optimizer:
    """An optimiser of this class for one tensor, with these settings of its group."""
    # As arguments too, which torch checks; some settings, as AdamW's decoupled_weight_decay, are no arguments.
    told = {name: settings[name] for name in settings.keys() & arguments(optimizer)}
    return optimizer([{"params": [tensor], **settings}], **told)


@functools.cache
def arguments(optimizer: type[torch.optim.Optimizer]) -> frozenset[str]:
    """The names of what an optimiser's class takes."""
    return frozenset(inspect.signature(optimizer).parameters)


def _is_part(part, whole, mask: Tensor) -> bool:
    """Whether these are the masked entries of a tensor like the mask; or the same numbers."""
    if not isinstance(whole, Tensor) or whole.dim() == 0:
        return part == whole
    return whole.shape == mask.shape and part.shape == whole[mask].shape and torch.allclose(part, whole[mask], RTOL, 0)
