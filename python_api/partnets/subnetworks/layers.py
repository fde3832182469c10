"""torch.nn's layers with proportions as an argument: for code that swaps one class for another."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn

from partkernels import Defaults
from partnets.subnetworks.partitioning import find, partition
from partnets.utils import seeds


class _Partitioned(nn.Module):
    """A mixin that partitions a layer as it is made."""

    def __init__(
        self,
        *args,
        proportions: Sequence[float] = (1.0,),
        seed: int | None = None,
        defaults: str | Defaults = "seed",
        scheme: str = "weight",
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        seed = seeds.random() if seed is None else seed
        if any(find(self)):  # a norm may have nothing to partition
            partition(self, proportions, seed=seed, defaults=defaults, scheme=scheme)


def _drop_in(dense: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of one of torch's layers that takes proportions as well."""
    own = [p for p in inspect.signature(_Partitioned.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    theirs = [p for p in inspect.signature(dense).parameters.values() if p.kind is not p.VAR_KEYWORD]
    doc = (
        f"torch.nn.{dense.__name__}, partitioned as partnets.partition(layer, proportions, ...) does.\n\n"
        f"Args:\n    *args, **kwargs: those of torch.nn.{dense.__name__}.\n"
        "    proportions: C numbers that sum to 1.\n    seed, defaults, scheme: see partnets.partition.\n"
    )
    attributes = {"__module__": __name__, "__doc__": doc, "__signature__": inspect.Signature([*theirs, *own])}
    return type(dense.__name__, (_Partitioned, dense), attributes)


LAYERS = (
    "Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "Embedding", "EmbeddingBag", "MultiheadAttention", "RNN", "LSTM", "GRU", "GroupNorm", "LayerNorm", "RMSNorm",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
)  # fmt: skip
for _name in LAYERS:
    globals()[_name] = _drop_in(getattr(nn, _name))
__all__ = list(LAYERS)
