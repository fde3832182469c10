"""LearningRate: a learned learning rate."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter, modules_outside_of_hyper
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, logarithmic

# Wider than the range used in practice.
RATES = logarithmic(1e-6, 10.0)


class LearningRate(Hyperparameter):
    """A learning rate of some modules' parameters, learned by lookahead (Baydin et al. 2018, here on held-out data).

    A partnets.optim optimiser made for the model finds this module and updates these parameters with its rate instead
    of `lr`. A scheduler multiplies the rate by a factor: `lr` relative to its initial value, with OneCycleLR to its
    highest, with CyclicLR to its lowest. Put the module anywhere in the model; it passes x through.

    Lookahead by one step finds the best rate for the next step. A whole training needs lower rates (Wu et al. 2018):
    partnets.Lookahead(steps=) looks further ahead.

    Args:
        of: the module or modules with these parameters: the network, for one rate, or a layer.
        rate: the initial rate.
        range: range of the rate.

    Shapes:
        x of any kind, returned unchanged.

    Raises:
        ValueError: rate is outside the range, or no parameter is trainable.

    Example:
        >>> import torch, partnets
        >>> layer = nn.Linear(4, 3)
        >>> model = partnets.partition(nn.Sequential(layer, LearningRate(layer, 0.5)), (0.5, 0.5))
        >>> optimizer = partnets.optim.SGD(model, lr=1e-3)
        >>> before = model[0].bias.detach().clone()
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> (before - model[0].bias.detach()).round()
        tensor([1., 1., 1.])
    """

    hyper_gradient = "lookahead"

    def __init__(self, of: nn.Module | Iterable[nn.Module], rate: float = 1e-3, *, range: Range = RATES) -> None:
        super().__init__()
        range.check("rate", rate)
        # In a list, so that these do not become submodules.
        self.of = [of] if isinstance(of, nn.Module) else list(of)
        if not self.governed():
            raise ValueError("there are no parameters that learn; pass of=, a module that has some.")
        self.rate = Learned(rate, range)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()

    def governed(self) -> set[nn.Parameter]:
        """Return the parameters that learn at this rate."""
        modules = modules_outside_of_hyper(self.of)
        parameters = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        return {parameter for parameter in parameters if parameter.requires_grad}
