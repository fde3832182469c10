"""LearningRate: the rate at which weights learn, itself learned."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, logarithmic

# What is tried in practice, and more.
RATES = logarithmic(1e-6, 10.0)


class LearningRate(Hyperparameter):
    """The learning rate of some modules' parameters, learned by looking ahead (Baydin et al. 2018, on unseen data).

    An optimiser of partnets.optim that is made for the model finds it, and steps these parameters by it instead of by
    its own `lr`; what a scheduler does to that counts as a factor, of OneCycleLR as one of its highest rate, of
    CyclicLR as one of its lowest. Put it anywhere in the model: a layer that passes x through.

    A step ahead shows what is best for the next step, and not for a whole training, which wants lower rates (Wu et al.
    2018): partnets.Lookahead(steps=) sees further.

    Args:
        of: the module whose parameters are meant, or several: the network, for one rate, or a layer.
        rate: the initial one.
        range: of it.

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        x of any kind to itself.

    Raises:
        ValueError: rate is not inside the range, or there are no parameters.

    Example:
        >>> import torch, partnets
        >>> layer = nn.Linear(4, 3)
        >>> model = partnets.partition(nn.Sequential(layer, LearningRate(layer, 0.5)), (0.5, 0.5))
        >>> optimizer = partnets.optim.SGD(model, lr=1e-3)
        >>> before = model[0].bias.detach().clone()
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> (before - model[0].bias.detach())[0].round()
        tensor([1., 1., 1.])
    """

    hyper_gradient = "lookahead"

    def __init__(self, of: nn.Module | Iterable[nn.Module], rate: float = 1e-3, *, range: Range = RATES) -> None:
        super().__init__()
        range.check("rate", rate)
        # In a list: these are no parts of this module.
        self.of = [of] if isinstance(of, nn.Module) else list(of)
        if not self.governed():
            raise ValueError("there are no parameters that learn; pass of=, a module that has some.")
        self.rate = Learned(rate, range)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def governed(self) -> set[nn.Parameter]:
        """The parameters that learn at this rate."""
        modules = {module for one in self.of for module in one.modules()}
        hyper = {part for one in modules if isinstance(one, Hyperparameter) for part in one.modules()}
        own = {parameter for module in modules - hyper for parameter in module.parameters(recurse=False)}
        return {parameter for parameter in own if parameter.requires_grad}
