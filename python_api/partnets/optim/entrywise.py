"""Steps of torch's optimisers for parts of a tensor: a test whether they may be taken, and differentiable ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Gradients of several sizes detect clipping and normalisation; RAdam changes its rule at the sixth step.
SHAPE, GRADIENTS = (6, 4), (1.0, 100.0, 0.01, 1.0, 1.0, 100.0, 0.01, 1.0)
# With a rate of 0, nothing would move.
LR = 1e-2
# Above rounding in float64: the order of sums depends on a tensor's size.
RTOL = 1e-9
# Added to gradients, so that roots of their squares have a derivative at 0; rounding removes it from other gradients.
LEAST = 1e-17
# Optimisers with steps that are not proportional to their learning rates.
OTHERWISE = (torch.optim.ASGD, torch.optim.Rprop)


def step(
    optimizer: type[torch.optim.Optimizer],
    tensor: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Step all entries of a tensor in place, as an optimiser of this class does.

    Args:
        optimizer: the class.
        tensor, grad: tensors of one shape; the tensor's grad is replaced.
        state: the state that the last call for these entries returned; empty for their first step.
        settings: the settings of the optimiser's group, by name.

    Returns:
        The new state, by name.

    Example:
        >>> x = torch.zeros(2)
        >>> state = step(torch.optim.SGD, x, torch.ones(2), {}, {"lr": 0.5, "momentum": 0.9})
        >>> x, state
        (tensor([-0.5000, -0.5000]), {'momentum_buffer': tensor([1., 1.])})
    """
    tensor.grad = grad
    one = make(optimizer, tensor, settings)
    if state:
        one.state[tensor] = state
    one.step()
    return one.state[tensor]


def check(
    optimizer: type[torch.optim.Optimizer], settings: dict[str, Any], device: torch.device | None
) -> dict[str, object]:
    """Step a small tensor as a whole and in two parts, and compare.

    Args:
        optimizer, settings: as for `step`.
        device: the device of the tensor; some settings, such as capturable, need a GPU.

    Returns:
        For each part of the state, by name, None if it has a number for each entry; otherwise a number like it.

    Raises:
        ValueError: the parts moved differently from the whole or could not be stepped, or the state has other parts
            after a later step than after the first; and errors of the optimiser.

    Example:
        >>> check(torch.optim.RMSprop, {}, torch.device("cpu"))
        {'step': tensor(8.), 'square_avg': None}
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64, device="cpu").to(device)

    whole, mask = draw(), draw() > 0
    masks, parts, states = (mask, ~mask), (whole[mask], whole[~mask]), [{}, {}]
    settings, names = settings | {"lr": LR}, []
    reference = make(optimizer, whole, settings)
    try:
        for scale in GRADIENTS:
            whole.grad = scale * draw()
            reference.step()
            names.append(reference.state[whole].keys() | set())
            states = [
                step(optimizer, part, whole.grad[mask], state, settings)
                for part, mask, state in zip(parts, masks, states, strict=True)
            ]
    except Exception as error:  # optimisers raise errors of many types
        raise ValueError(f"{optimizer.__name__} cannot step parts of a tensor: {error}; {_CURE}") from error
    expected = reference.state[whole]
    if names[0] != names[-1]:
        late = ", ".join(sorted(names[0] ^ names[-1]))
        raise ValueError(f"{optimizer.__name__} has {late} not from its first step on; {_CURE}")
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.shape == mask.shape and value.dtype != whole.dtype:
            raise ValueError(f"{optimizer.__name__} has {name} in {value.dtype}, not in the parameter's dtype; {_CURE}")
    for part, mask, state in zip(parts, masks, states, strict=True):
        same = state.keys() == expected.keys() and _is_part(part, whole, mask)
        if not same or not all(_is_part(state[name], expected[name], mask) for name in state):
            raise ValueError(f"{optimizer.__name__} moves parts of a tensor differently from the whole tensor; {_CURE}")
    return {name: None if isinstance(value, Tensor) and value.dim() else value for name, value in expected.items()}


_CURE = "pass one that steps each entry by itself, such as torch.optim.RMSprop."


def differentiable_step(
    optimizer: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
    entries: Tensor,
    grad: Tensor,
    rate: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return a tensor and its state after a step of one of torch's optimisers; the arguments are left unchanged.

    Args:
        optimizer: the class, which must have the setting `differentiable`.
        settings: the settings of its group, by name.
        state: the tensor's state, by name; empty before the first step.
        entries, grad: tensors of one shape.
        rate: the learning rate as a tensor with a graph, in place of the rate in the settings.

    Raises:
        ValueError: a step of this optimiser is not differentiable, or not with these settings.

    Example:
        >>> rate = torch.tensor(0.5, requires_grad=True)
        >>> after, _ = differentiable_step(torch.optim.SGD, {}, {}, torch.zeros(2), torch.tensor([1.0, 3.0]), rate)
        >>> after.sum().backward()
        >>> after.tolist(), rate.grad.item()
        ([-0.5, -1.5], -4.0)
    """
    known = arguments(optimizer)
    if "differentiable" not in known or (rate is not None and issubclass(optimizer, OTHERWISE)):
        what = "makes steps that are not proportional to its rate" if "differentiable" in known else "has none"
        raise ValueError(
            "autograd can differentiate the steps of optimisers that have `differentiable`, and"
            f" {optimizer.__name__} {what}; train by partnets.optim.SGD or Adam, or another of torch.optim."
        )
    state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
    if settings.get("momentum") and issubclass(optimizer, torch.optim.SGD) and not state:
        # SGD detaches the gradient that becomes its first momentum; with a momentum of 0 before, it does not.
        if settings.get("dampening"):
            raise ValueError(
                f"the first step with dampening={settings['dampening']} cannot be differentiated; pass dampening=0."
            )
        state = {"momentum_buffer": torch.zeros_like(entries)}
    told = {**settings, "differentiable": True, "foreach": False, "fused": False}
    if rate is not None:
        told["lr"] = rate.item()
    # Steps are divided by their rate. At a rate of 0, as at the end of a schedule, the step is 0 times that of rate 1.
    if is_still := not issubclass(optimizer, OTHERWISE) and told.get("lr") == 0:
        told["lr"] = 1.0
    tensor = entries.clone()
    state = step(
        optimizer, tensor, grad + LEAST, state, {name: told[name] for name in told.keys() & {*known, *settings}}
    )
    if is_still:
        return entries + (0.0 if rate is None else rate) * (tensor - entries), state
    if rate is None:
        return tensor, state
    # Few optimisers take a tensor as their rate; the steps of all are proportional to it.
    return entries + (rate / rate.detach()) * (tensor - entries), state


def make(optimizer: type[torch.optim.Optimizer], tensor: Tensor, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimiser of this class for one tensor, with these settings of its group."""
    # torch checks arguments; some settings, such as AdamW's decoupled_weight_decay, are not arguments.
    told = {name: settings[name] for name in settings.keys() & arguments(optimizer)}
    return optimizer([{"params": [tensor], **settings}], **told)


@functools.cache
def arguments(optimizer: type[torch.optim.Optimizer]) -> frozenset[str]:
    """Return the names of the arguments of an optimiser's class."""
    return frozenset(inspect.signature(optimizer).parameters)


def _is_part(part, whole, mask: Tensor) -> bool:
    """Return whether a part has the masked entries of a tensor shaped like the mask, or is the same number."""
    if not isinstance(whole, Tensor) or whole.dim() == 0:
        return part == whole
    return whole.shape == mask.shape and part.shape == whole[mask].shape and torch.allclose(part, whole[mask], RTOL, 0)
