"""PartitionedRows: layers that have a row of every parameter for each partition, multiplied or added up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from partkernels.partition import sizes
from partnets.partitioned import Partitioned, as_class, check_parameters
from partnets.rows import product, total, with_rows


class PartitionedRows(Partitioned):
    """A mixin for layers all of whose parameters are scales and shifts (Appendix I.2).

    The scale of subnetwork k is s_1 * ... * s_k and its shift b_1 + ... + b_k: row i of a parameter [C, ...] is s_i or
    b_i. The first row starts at the ordinary layer's value, the others at 1 or 0, so that all subnetworks start alike.
    With C = 1 the parameters and the state_dict are those of the ordinary layer.

    Put it before the ordinary layer among the bases, name that layer in `ordinary` and its parameters in `scales` and
    `shifts`, call `divide` at the end of the constructor, and compute with `self.live`, as partnets.GroupNorm does.

    Attributes:
        count, active, update: see Partitioned.
    """

    ordinary: type[nn.Module]
    scales: tuple[str, ...] = ()
    shifts: tuple[str, ...] = ()

    def divide(self, proportions: Sequence[float]) -> None:
        """Partitions this layer, which is still an ordinary one inside; of the proportions only their number counts."""
        sizes(0, proportions)
        check_parameters(self, *self.scales, *self.shifts)
        count = len(proportions)
        for name, parameter in self.named_parameters(recurse=False):
            setattr(self, name, with_rows(parameter, count, neutral=1.0 if name in self.scales else 0.0))
        self.count = self.active = self.update = count

    @classmethod
    def from_ordinary(
        cls, layer: nn.Module, proportions: Sequence[float], *, seed: int | None = None, defaults="seed"
    ) -> PartitionedRows:
        """A partitioned layer made of an ordinary one, which stays as it is; parameters that need no change are shared.

        Dtype, device, requires_grad, training mode and hooks are the layer's. seed and defaults are taken as every rule
        of partnets.register takes them, and change nothing: all entries are live in every subnetwork.

        Raises:
            ValueError: the proportions are invalid, or the layer has other parameters than its class.

        Example:
            >>> import partnets
            >>> layer = partnets.LayerNorm.from_ordinary(nn.LayerNorm(2), (0.5, 0.5))
            >>> layer.weight.tolist(), layer.bias.tolist()
            ([[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]])
        """
        new = as_class(layer, cls)
        new.divide(proportions)
        return new

    def to_ordinary(self, active: int) -> nn.Module:
        """The ordinary layer that computes what subnetwork `active` computes; shares no parameter with this one."""
        new = as_class(self, self.ordinary)
        for name in (*self.scales, *self.shifts):
            parameter = self.own(name)
            if parameter is not None:
                value = self._combined(name, active, None).clone()
                setattr(new, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        return new

    def live(self, name: str) -> Tensor | None:
        """A parameter of the live subnetwork; only row `update` gets a gradient. None if there is no such parameter."""
        return None if self.own(name) is None else self._combined(name, self.active, self.update)

    def _combined(self, name: str, active: int, update: int | None) -> Tensor:
        combine = product if name in self.scales else total
        return combine(self.own(name), self.count, active, update)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"partitions={self.count}")))
