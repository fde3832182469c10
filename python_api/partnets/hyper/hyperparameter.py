"""Hyperparameter: the base class of modules whose parameters are ψ, trained on the out-of-chunk loss."""

from __future__ import annotations

from torch import nn


class Hyperparameter(nn.Module):
    """A module whose parameters are hyperparameters ψ (Eq. 4).

    partnets.partition leaves it as it is, partnets.optim leaves its parameters to the optimiser of hyperparameters, and
    partnets.Trainer records its values. Derive from it, keep unconstrained parameters, use them in forward, and give
    them back in the user's units in values().

    Example:
        >>> import torch
        >>> class Gain(Hyperparameter):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.log_gain = nn.Parameter(torch.zeros(()))
        ...     def forward(self, x):
        ...         return self.log_gain.exp() * x
        ...     def values(self):
        ...         return {"gain": self.log_gain.exp().item()}
        >>> Gain().values()
        {'gain': 1.0}
    """

    def values(self) -> dict[str, float]:
        """The name and the present value, in the user's units, of each hyperparameter."""
        raise NotImplementedError(
            f"{type(self).__name__} has no values(); define one that returns a dict of floats, for progress"
            " and History."
        )


def hyperparameters(model: nn.Module) -> list[nn.Parameter]:
    """ψ: the parameters of all Hyperparameter modules of a model.

    Example:
        >>> from partnets import hyper
        >>> len(hyperparameters(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2))))
        1
    """
    modules = [module for module in model.modules() if isinstance(module, Hyperparameter)]
    return [parameter for module in modules for parameter in module.parameters()]
