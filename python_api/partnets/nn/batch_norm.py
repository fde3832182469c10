"""BatchNorm1d, BatchNorm2d and BatchNorm3d: torch's, with statistics of its own for each subnetwork."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from partnets.nn.layer import PartitionedLayer
from partnets.nn.nesting import LiveUnits
from partnets.nn.own_parameters import OwnParameters
from partnets.nn.own_state import OwnState, states_of
from partnets.nn.partitioned import partitioned_layers
from partnets.utils.modules import is_sharded

# What a state_dict calls the number of batches at which statistics were estimated.
ESTIMATED_AT = "estimated_at"
UNKNOWN_AT = -1
# And with which weights.
ESTIMATED_WITH = "estimated_with"
# Whole numbers, by their size in bytes.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class _BatchNorm(PartitionedLayer):
    """torch.nn.BatchNorm with the scale s_1 * ... * s_k and the shift b_1 + ... + b_k of subnetwork k (Appendix I.2).

    Each subnetwork has running statistics of its own. Shared ones would carry what a later chunk looks like into
    earlier subnetworks, and fit none of them. Those of the live subnetwork follow the batches that it trains on; where
    nothing learns (update is None) a batch is normalised by its own statistics, in training mode, and leaves none.

    As one subnetwork learns, all others change too, and their statistics go stale. Trainer and lml estimate them anew
    where they are needed; in a loop of your own, partnets.estimate_statistics does.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in torch.nn.BatchNorm.
        proportions: as in partnets.GroupNorm.

    Attributes:
        weight: [C, num_features], the row s_i for each partition, all 1 at the start; [num_features] if C is 1, and
            None without affine.
        bias: as weight, for b_i, all 0 at the start.
        running_mean, running_var: [C, num_features], a row for each subnetwork; [num_features] if C is 1, and None
            without track_running_stats.
        num_batches_tracked: [C], or [] if C is 1.
        is_stale: whether something has learned since the running statistics were estimated, or given.
        count, active, update: see Partitioned.

    Raises:
        ValueError: the proportions are invalid; and torch.nn.BatchNorm's own errors.
    """

    shifts = ("bias",)
    scales = ("weight",)
    unit_dim = 1
    unit_names = ("num_features",)
    keeps_units = True
    notes: ClassVar[Mapping[str, type]] = {**PartitionedLayer.notes, ESTIMATED_AT: int, ESTIMATED_WITH: str}
    # The batches of all subnetworks when the statistics were estimated; None where nobody knows.
    _estimated_at: int | None = None
    # And a sum of all weights of the model then; None where nobody has told. Averages of weights move no batch.
    _estimated_with: str | None = None

    def divide(self, proportions, **options):
        super().divide(proportions, **options)
        if self.count > 1:
            for name, buffer in self._statistics():
                self._buffers[name] = buffer.expand(self.count, *buffer.shape).clone()
        self.hold_statistics()

    @property
    def is_stale(self) -> bool:
        # The only subnetwork of C = 1 learns in every step.
        return self._buffers["running_mean"] is not None and self.count > 1 and self._batches() != self._estimated_at

    @property
    def estimated_at(self) -> int:
        """What a state_dict has of it."""
        return UNKNOWN_AT if self._estimated_at is None else self._estimated_at

    @property
    def estimated_with(self) -> str:
        """What a state_dict has of it."""
        return self._estimated_with or ""

    def hold_statistics(self, weights: str | None = None) -> None:
        """Takes the present running statistics for those of the present weights, of which this is the model's sum."""
        self._estimated_at, self._estimated_with = self._batches(), weights

    def reset_running_stats(self) -> None:
        """As torch's, of the live subnetwork alone: torch.optim.swa_utils.update_bn estimates those."""
        rows = slice(None) if self.__dict__.get("count", 1) == 1 else self.active - 1
        for name, buffer in self._statistics():
            buffer[rows if buffer.dim() else ...] = float(name == "running_var")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name, buffer in self._statistics():
            buffer.fill_(float(name == "running_var"))

    def __getattr__(self, name: str):
        """As PartitionedLayer's, for statistics too: inside of a subnetwork they are its own."""
        value = super().__getattr__(name)
        own = self.__dict__
        if value is None or name not in own["_buffers"] or own.get("count", 1) == 1 or not self.is_inside():
            return value
        value = value[self.active - 1]
        if self.nesting is None or not value.dim():
            return value
        units = self.nesting.outputs
        value = units.take(value, 0, self.active)
        return value if self.is_narrow else units.spread(value, 0, self.active)

    def _apply(self, fn, recurse=True):
        self._estimated_with = None  # which are the same weights in another dtype
        return super()._apply(fn, recurse)

    def _batches(self) -> int | None:
        batches = self._buffers["num_batches_tracked"]
        return None if batches is None or batches.is_meta else int(batches.sum())

    def to_ordinary(self, active):
        new = super().to_ordinary(active)
        layer = new.layer if isinstance(new, LiveUnits) else new
        for name, buffer in self._statistics():
            value = buffer[active - 1] if self.count > 1 else buffer
            if value.dim() and self.nesting is not None:
                value = self.nesting.outputs.take(value, 0, active)
            layer._buffers[name] = value.clone()
        return new

    def _statistics(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._buffers.items() if buffer is not None]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count > 1:
            destination[prefix + ESTIMATED_AT] = self.estimated_at
            destination[prefix + ESTIMATED_WITH] = self.estimated_with

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        # Looked at before: of old files torch adds num_batches_tracked to the state_dict.
        given = {name for name, _ in self._statistics() if prefix + name in state_dict}
        before = self._batches()
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.count == 1 or not given:
            return
        if not {"running_mean", "running_var"} <= given:  # of two trainings, so that nobody knows of which weights
            self._estimated_at = self._estimated_with = None
        else:
            unchanged = self._estimated_at if self._batches() == before else None
            found = state_dict.get(prefix + ESTIMATED_AT, unchanged)
            self._estimated_with = state_dict.get(prefix + ESTIMATED_WITH) or None
            self._estimated_at = None if found == UNKNOWN_AT else found

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        keeps = self._buffers["running_mean"] is not None
        of_batch = self.training or not keeps
        learns = self.training and self.update is not None and self.track_running_stats
        mean = var = None
        factor = 0.0
        if keeps and (learns or not self.training):
            mean, var, batches = (
                buffer[self.active - 1] if self.count > 1 else buffer for _, buffer in self._statistics()
            )
            if learns:
                batches.add_(1)
                factor = 1.0 / float(batches) if self.momentum is None else self.momentum

        def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            if self.nesting is None or mean is None:
                return F.batch_norm(x, mean, var, weight, bias, of_batch, factor, self.eps)
            units, active = self.nesting.outputs, self.active
            live = [units.take(each, 0, active) for each in (mean, var)]
            y = F.batch_norm(x, *live, weight, bias, of_batch, factor, self.eps)
            if learns and len(units.live(active)) > 1:  # otherwise these are views, which have followed the batch
                for each, values in zip((mean, var), live, strict=True):
                    units.put(each, 0, active, values)
            return y

        return self.compute_live(norm, input, "weight", "bias")


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    __doc__ = (
        (_BatchNorm.__doc__ or "")
        + """
    Shapes:
        x [batch, num_features] or [batch, num_features, length] to the same.

    Example:
        >>> import torch
        >>> layer = BatchNorm1d(4, proportions=(0.8, 0.2))
        >>> layer(torch.randn(5, 4)).shape, layer.running_mean.shape
        (torch.Size([5, 4]), torch.Size([2, 4]))
    """
    )

    ordinary = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    __doc__ = (
        (_BatchNorm.__doc__ or "")
        + """
    Shapes:
        x [batch, num_features, height, width] to the same.

    Example:
        >>> import torch
        >>> layer = BatchNorm2d(4, proportions=(0.8, 0.2))
        >>> layer(torch.randn(5, 4, 6, 6)).shape, layer.running_var.shape
        (torch.Size([5, 4, 6, 6]), torch.Size([2, 4]))
    """
    )

    ordinary = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    __doc__ = (
        (_BatchNorm.__doc__ or "")
        + """
    Shapes:
        x [batch, num_features, depth, height, width] to the same.

    Example:
        >>> import torch
        >>> BatchNorm3d(4, proportions=(0.8, 0.2))(torch.randn(5, 4, 2, 6, 6)).shape
        torch.Size([5, 4, 2, 6, 6])
    """
    )

    ordinary = nn.BatchNorm3d


def partitioned_norms(model: nn.Module) -> list[nn.Module]:
    """The partitioned BatchNorm layers of a model."""
    return [layer for _, layer in partitioned_layers(model) if isinstance(layer, _BatchNorm)]


def stale_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The partitioned BatchNorm layers whose running statistics are older than the weights, by their paths."""
    norms = {path: layer for path, layer in partitioned_layers(model) if isinstance(layer, _BatchNorm)}
    present = sum_of_weights(model) if any(norm._estimated_with is not None for norm in norms.values()) else None
    return {path: norm for path, norm in norms.items() if norm.is_stale or _are_others(norm._estimated_with, present)}


def _are_others(before: str | None, present: str | None) -> bool:
    """Whether these are sums of other weights, of the same model: a part of it has fewer."""
    known = before is not None and present is not None
    return known and before != present and before.partition(":")[0] == present.partition(":")[0]


def sum_of_weights(model: nn.Module) -> str | None:
    """Of the bits of what partitions own of a model, which tells most changes; None if no rank has all of them.

    Example:
        >>> import torch
        >>> import partnets
        >>> layer = partnets.Linear(2, 2, proportions=(0.5, 0.5))
        >>> before = sum_of_weights(layer)
        >>> _ = nn.init.ones_(layer.bias)
        >>> sum_of_weights(layer) == before
        False
    """
    found, owned = [], [parameter for _, layer in partitioned_layers(model) for _, parameter in layer.owned()]
    for parameter in dict.fromkeys(owned):
        if parameter.is_meta or is_lazy(parameter) or is_sharded(parameter):
            return None
        words = parameter.detach().reshape(-1).view(WORDS[parameter.itemsize])
        found.append(int(words.sum(dtype=torch.int64)))
    return f"{len(found)}:{hash(tuple(found))}"


def outdate_statistics(model: nn.Module) -> None:
    """Says that what comes before the norms has changed, though none of them has learned."""
    for _, layer in partitioned_layers(model):
        if isinstance(layer, _BatchNorm) and layer.training:
            layer._estimated_at = None


def warn_of_stale(model: nn.Module) -> None:
    """Warns the caller's caller that what a model computes in evaluation mode is not what it learned."""
    if stale := list(stale_norms(model)):
        warnings.warn(
            f"the running statistics of {len(stale)} BatchNorm layers ({stale[0] or 'the model itself'} is the first)"
            " are older than the weights: every step changes several subnetworks, but only the statistics of one. Call"
            " partnets.estimate_statistics(model, chunks) first, as Trainer.fit does at its end.",
            stacklevel=3,
        )


def heedless_norms(model: nn.Module) -> list[nn.Module]:
    """The modules whose running statistics follow every batch in training mode, whether anything learns or not."""
    return [module for each in running_norms(model) for module in each if not isinstance(module, _BatchNorm | OwnState)]


def running_norms(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules with running statistics: those in partitioned layers, and those that partnets.partition left out.

    The latter would carry what a later chunk looks like into earlier subnetworks: train with them in evaluation mode.

    Example:
        >>> import partnets
        >>> model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> inside, outside = running_norms(partnets.partition(model, (0.5, 0.5), skip="0"))
        >>> len(inside), outside == [model[0]]
        (1, True)
    """
    # Of a module with own parameters its partitions own those, and its state, and nothing else that is inside.
    layers = [layer for _, layer in partitioned_layers(model)]
    owned = {module for layer in layers if not isinstance(layer, OwnParameters) for module in layer.modules()}
    keepers = [layer for layer in layers if isinstance(layer, OwnState)]
    states = [state for layer in keepers for state in states_of(layer).values()]
    owned |= {*keepers, *(module for state in states for module in state.modules())}
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [module for module in norms if module in owned], [module for module in norms if module not in owned]
