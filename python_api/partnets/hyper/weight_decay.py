"""WeightDecay: the squared norm of weights, times a learned strength."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from partnets.hyper.hyperparameter import modules_outside_of_hyper
from partnets.hyper.learned import Learned
from partnets.hyper.penalty import Penalty
from partnets.hyper.ranges import Range, logarithmic

# Wider than the range used in practice.
DECAYS = logarithmic(1e-7, 1.0)
# Their scales may have as many dimensions as their input.
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


class WeightDecay(Penalty):
    """A penalty of decay / 2 times the sum of all squared weights, added to the training loss.

    In layers of partnets.stn these are each example's weights, computed without materialising them, and each example
    may have its own decay. In partitioned models they are the weights of the active subnetwork. A weight is a parameter
    of two dimensions or more; biases and scales of norms are left out. Put the module anywhere in the model; it passes
    x through.

    Args:
        of: the module or modules with these weights: the network, for one decay, or a layer.
        decay: the initial decay, in the convention of torch.optim.SGD's weight_decay.
        range: range of the decay.

    Shapes:
        x [batch, ...], returned unchanged.

    Raises:
        ValueError: decay is outside the range, or there are no weights.
        RuntimeError: see hyper.Penalty.

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> layer = nn.Linear(4, 3)
        >>> model = nn.Sequential(layer, WeightDecay(layer, 0.01))
        >>> with hyper.penalties() as found:
        ...     y = model(torch.ones(2, 4))
        >>> torch.allclose(found[0], 0.005 * layer.weight.square().sum())
        True
    """

    per_example = True

    def __init__(self, of: nn.Module | Iterable[nn.Module], decay: float = 1e-4, *, range: Range = DECAYS) -> None:
        super().__init__()
        range.check("decay", decay)
        # In a list, so that these do not become submodules.
        self.of = [of] if isinstance(of, nn.Module) else list(of)
        if not any(True for _ in self._weights()):
            raise ValueError("there are no weights to decay; pass of=, a module with parameters of two dimensions.")
        self.decay = Learned(decay, range)

    def penalty(self, x: Tensor) -> Tensor:
        # Not in x's dtype, which would round its derivative.
        decay = self.decay.range.transform(self.decay.unconstrained(x))
        squares = sum(
            layer.squared_norm(name) if hasattr(layer, "squared_norm") else getattr(layer, name).square().sum()
            for layer, name in self._weights()
        )
        return (decay.reshape(-1) if decay.dim() else decay) * squares / 2

    def decayed(self) -> list[nn.Parameter]:
        """Return the decayed weights."""
        return [layer._parameters[name] for layer, name in self._weights()]

    def _weights(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each layer with the name of its weight; a shared weight only once."""
        seen: set[nn.Parameter] = set()
        for layer in modules_outside_of_hyper(self.of):
            for name in [] if isinstance(layer, NORMS) else _names(layer):
                parameter = layer._parameters[name]
                is_weight = parameter is not None and parameter.dim() > 1 and "bias" not in name
                if is_weight and parameter not in seen:
                    seen.add(parameter)
                    yield layer, name


def _names(layer: nn.Module) -> list[str]:
    """Return the names of a layer's parameters; for layers of partnets.stn, those that replace torch's."""
    return list(layer.names() if hasattr(layer, "squared_norm") else layer._parameters)
