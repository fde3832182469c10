"""torch.nn's layers with proportions as an argument: for code that swaps one class for another."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from partkernels import Defaults
from partnets.subnetworks.partitioning import find, partition
from partnets.utils import seeds

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
]


Layer = TypeVar("Layer", bound=type[nn.Module])


class _Partitioned(nn.Module):
    """A mixin that partitions a layer as it is made."""

    def __init__(
        self,
        *args: Any,
        proportions: Sequence[float] = (1.0,),
        seed: int | None = None,
        defaults: str | Defaults = "seed",
        scheme: str = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        seed = seeds.random() if seed is None else seed
        if any(find(self)):  # a norm may have nothing to partition
            partition(self, proportions, seed=seed, defaults=defaults, scheme=scheme)


def _drop_in(cls: Layer) -> Layer:
    """Give a subclass of one of torch's layers a signature and a docstring with the arguments of both."""
    dense = cls.__bases__[-1]
    own = [p for p in inspect.signature(_Partitioned.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    theirs = [p for p in inspect.signature(dense).parameters.values() if p.kind is not p.VAR_KEYWORD]
    cls.__signature__ = inspect.Signature([*theirs, *own])
    cls.__doc__ = (
        f"torch.nn.{dense.__name__}, partitioned as partnets.partition(layer, proportions, ...) does.\n\n"
        f"Args:\n    *args, **kwargs: those of torch.nn.{dense.__name__}.\n"
        "    proportions: C numbers that sum to 1.\n    seed, defaults, scheme: see partnets.partition.\n"
    )
    return cls


@_drop_in
class Linear(_Partitioned, nn.Linear): ...


@_drop_in
class Bilinear(_Partitioned, nn.Bilinear): ...


@_drop_in
class Conv1d(_Partitioned, nn.Conv1d): ...


@_drop_in
class Conv2d(_Partitioned, nn.Conv2d): ...


@_drop_in
class Conv3d(_Partitioned, nn.Conv3d): ...


@_drop_in
class ConvTranspose1d(_Partitioned, nn.ConvTranspose1d): ...


@_drop_in
class ConvTranspose2d(_Partitioned, nn.ConvTranspose2d): ...


@_drop_in
class ConvTranspose3d(_Partitioned, nn.ConvTranspose3d): ...


@_drop_in
class Embedding(_Partitioned, nn.Embedding): ...


@_drop_in
class EmbeddingBag(_Partitioned, nn.EmbeddingBag): ...


@_drop_in
class MultiheadAttention(_Partitioned, nn.MultiheadAttention): ...


@_drop_in
class RNN(_Partitioned, nn.RNN): ...


@_drop_in
class LSTM(_Partitioned, nn.LSTM): ...


@_drop_in
class GRU(_Partitioned, nn.GRU): ...


@_drop_in
class GroupNorm(_Partitioned, nn.GroupNorm): ...


@_drop_in
class LayerNorm(_Partitioned, nn.LayerNorm): ...


@_drop_in
class RMSNorm(_Partitioned, nn.RMSNorm): ...


@_drop_in
class BatchNorm1d(_Partitioned, nn.BatchNorm1d): ...


@_drop_in
class BatchNorm2d(_Partitioned, nn.BatchNorm2d): ...


@_drop_in
class BatchNorm3d(_Partitioned, nn.BatchNorm3d): ...
