"""RNN, LSTM and GRU: torch's, by their weights, which are rebuilt once for a whole sequence."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from partkernels import Uniform
from partnets.nn.layer import PartitionedLayer
from partnets.utils import seeds


class FlatWeights(nn.Module):
    """A mixin for torch's recurrent layers, which keep their parameters in one list: here it is made for each call.

    A subclass says what is in it by `flat_weight`.
    """

    def flat_weight(self, name: str) -> Tensor:
        """What the layer computes with in place of the parameter of this name; under construction that itself."""
        raise NotImplementedError

    @property
    def _flat_weights(self) -> list[Tensor]:
        # Under torch's own constructor, which fills this list, the parameters come one by one.
        return [self.flat_weight(name) for name in self._flat_weights_names if name in self._parameters]

    @_flat_weights.setter
    def _flat_weights(self, values) -> None:
        pass

    def __setattr__(self, name: str, value) -> None:
        nn.Module.__setattr__(self, name, value)  # without torch's record of the list above

    def _init_flat_weights(self) -> None:
        self._flat_weight_refs = []

    def _update_flat_weights(self) -> None:
        """Nothing: the list is made anew for each call."""

    flatten_parameters = _update_flat_weights

    def forget_flat_weights(self) -> None:
        """Drops an ordinary layer's list of its parameters, which would keep them alive."""
        self.__dict__.pop("_flat_weights", None)
        self._flat_weight_refs = []


class Recurrent(FlatWeights, PartitionedLayer):
    """What torch's recurrent layers share: they read their parameters as one list, here that of the live subnetwork.

    Args:
        input_size ... dtype: as in torch's layer.
        proportions, seed, defaults, scheme: as in partnets.Linear; a node is an entry of the hidden state, with all of
            its gates.

    Attributes:
        weight_ih_l0, weight_hh_l0, ...: as torch's.
        bias_ih_l0, bias_hh_l0, ...: as torch's, [C, ...], a row for each partition; without the C if it is 1.
        partitions, count, active, update: see PartitionedLayer.

    Raises:
        ValueError: as in partnets.Linear; and the errors of torch's layer.
    """

    @property
    def weights(self):
        return tuple(name for name in self._flat_weights_names if name.startswith("weight"))

    @property
    def shifts(self):
        return tuple(name for name in self._flat_weights_names if name.startswith("bias"))

    def flat_weight(self, name):
        return self.live(name) if "count" in self.__dict__ else self._parameters[name]

    def divide(self, proportions, **options):
        super().divide(proportions, **options)
        self.forget_flat_weights()

    def divided(self, name, weight, proportions, seed, scheme):
        if scheme == "node":
            # Both weights that lead to the hidden state of a layer and direction are divided alike.
            seed = seeds.derived(seed, name.replace("weight_ih", "").replace("weight_hh", ""))
            name = name if name.startswith("weight_hr") else "weight"
        return super().divided(name, weight, proportions, seed, scheme)

    def nodes(self, name, shape):
        units = shape[0] if name.startswith("weight_hr") else self.hidden_size
        return (torch.arange(shape[0], device="cpu") % units)[:, None]

    def usual_distribution(self, name):
        return functools.partial(Uniform, 1 / math.sqrt(self.hidden_size))

    def to_ordinary(self, active):
        new = super().to_ordinary(active)
        new._init_flat_weights()
        return new


class RNN(Recurrent, nn.RNN):
    __doc__ = (
        (Recurrent.__doc__ or "")
        + """
    Example:
        >>> RNN(4, 8, proportions=(0.5, 0.5), seed=0)(torch.ones(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    )

    ordinary = nn.RNN


class LSTM(Recurrent, nn.LSTM):
    __doc__ = (
        (Recurrent.__doc__ or "")
        + """
    Example:
        >>> LSTM(4, 8, num_layers=2, proportions=(0.5, 0.5), seed=0)(torch.ones(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    )

    ordinary = nn.LSTM


class GRU(Recurrent, nn.GRU):
    __doc__ = (
        (Recurrent.__doc__ or "")
        + """
    Example:
        >>> GRU(4, 8, proportions=(0.5, 0.5), seed=0)(torch.ones(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    )

    ordinary = nn.GRU
