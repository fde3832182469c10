"""followed: a step of torch's optimisers as a function, through which autograd goes back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from partnets.optim import entrywise

# Added to gradients, so that roots of their squares have a derivative where they are 0: no other gradient sees it.
LEAST = 1e-17
# How far these move is not in proportion to their learning rates.
OTHERWISE = (torch.optim.ASGD, torch.optim.Rprop)


def followed(
    optimizer: type[torch.optim.Optimizer],
    settings: Mapping,
    state: Mapping,
    entries: Tensor,
    grad: Tensor,
    rate: Tensor | None = None,
) -> tuple[Tensor, dict]:
    """What a step of one of torch's optimisers makes of a tensor and of its state; all that it is given stays.

    Args:
        optimizer: the class; its `differentiable` makes this possible.
        settings: of its group, by name.
        state: the tensor's, by name; empty before the first step.
        entries, grad: of one shape.
        rate: the learning rate as a tensor that autograd follows, in place of that of the settings.

    Raises:
        ValueError: this optimiser cannot be followed, or not with these settings.

    Example:
        >>> rate = torch.tensor(0.5, requires_grad=True)
        >>> after, _ = followed(torch.optim.SGD, {}, {}, torch.zeros(2), torch.tensor([1.0, 3.0]), rate)
        >>> after.sum().backward()
        >>> after.tolist(), rate.grad.item()
        ([-0.5, -1.5], -4.0)
    """
    known = entrywise.arguments(optimizer)
    if "differentiable" not in known or (rate is not None and issubclass(optimizer, OTHERWISE)):
        what = "moves weights otherwise than in proportion to its rate" if "differentiable" in known else "has none"
        raise ValueError(
            "autograd goes back through the steps of optimisers that have `differentiable`, and"
            f" {optimizer.__name__} {what}; train by partnets.optim.SGD or Adam, or another of torch.optim."
        )
    state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
    if settings.get("momentum") and issubclass(optimizer, torch.optim.SGD) and not state:
        # It detaches the gradient that its momentum starts from; from a zero it is followed.
        if settings.get("dampening"):
            raise ValueError(f"the first step with dampening={settings['dampening']} cannot be followed; pass 0.")
        state = {"momentum_buffer": torch.zeros_like(entries)}
    told = {**settings, "differentiable": True, "foreach": False, "fused": False}
    if rate is not None:
        told["lr"] = rate.item()
    # They divide by their rate. Where that is 0, as at an end of a schedule, the step is 0 times that of another rate.
    if is_still := not issubclass(optimizer, OTHERWISE) and told.get("lr") == 0:
        told["lr"] = 1.0
    tensor = entries.clone()
    one = entrywise.make(optimizer, tensor, {name: told[name] for name in told.keys() & {*known, *settings}})
    tensor.grad = grad + LEAST
    if state:
        one.state[tensor] = state
    one.step()
    if is_still:
        return entries + (0.0 if rate is None else rate) * (tensor - entries), one.state[tensor]
    if rate is None:
        return tensor, one.state[tensor]
    # Few of them take a tensor as their rate; all move in proportion to it.
    return entries + (rate / rate.detach()) * (tensor - entries), one.state[tensor]
