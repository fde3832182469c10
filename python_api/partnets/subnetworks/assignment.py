"""The rule by which `partition` assigns the entries of each parameter, and the buffers of a partitioned module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partkernels import Defaults, Partition, Stored, Zeros
from partnets.subnetworks.channels import Narrow
from partnets.subnetworks.initial_values import Distribution, Start, declared, distribution_of, is_of_few_kinds
from partnets.subnetworks.parameters import PartitionedParameter
from partnets.subnetworks.rules import known_rule, rule_of
from partnets.subnetworks.saving import add_hooks
from partnets.subnetworks.state import (
    ATTRIBUTE,
    BATCHES,
    DEFAULTS,
    ESTIMATED,
    LEARNED,
    MAP,
    ROWS,
    STORED,
    PartitionState,
    bytes_of,
    check_map,
    holder_of,
    is_norm,
    numbers_of,
    state_of,
)
from partnets.subnetworks.statistics import hold_statistics
from partnets.subnetworks.switch import noted
from partnets.utils import seeds

# The stream of a weight's defaults is 0; a bias is drawn from another, so that the two are independent.
BIAS_STREAM = 1
SCHEMES = ("weight", "node")


class Assignment:
    """The planned partitions of a module, which `apply` makes.

    Args:
        module: not partitioned yet.
        proportions: C numbers that sum to 1.
        seed: the seed of this module.
        defaults: 'seed', 'zero', 'stored' or one of partkernels' Defaults.
        scheme: 'weight' or 'node'.
        frozen: whether parameters that require no gradient are partitioned as well.
        statistics: the names of buffers and frozen parameters with a separate value for each subnetwork.
        narrow: the nested channels of the module, or None.

    Attributes:
        partitions: of weights, by name.
        sizes: of weights on the meta device, the numbers of entries of partitions 1..C.
        values: the new values of parameters that are drawn again, by name.
        vectors: for each parameter with a vector for each partition, whether it is multiplied.
        redrawn: the names of weights that get new values, and whether the old ones look like a fresh draw.
    """

    def __init__(
        self,
        module: nn.Module,
        proportions: Sequence[float],
        *,
        seed: int,
        defaults: str | Defaults,
        scheme: str,
        frozen: bool,
        statistics: Sequence[str],
        narrow: Narrow | None,
    ) -> None:
        self.plan = {"proportions": proportions, "seed": seed, "defaults": defaults, "scheme": scheme}
        self.plan |= {"frozen": frozen, "statistics": statistics, "narrow": narrow}
        self.module, self.proportions, self.num_partitions, self.seed = module, proportions, len(proportions), seed
        self.defaults, self.scheme, self.statistics = defaults, scheme, tuple(statistics)
        self.rule, self.is_known = rule_of(type(module)), known_rule(type(module)) is not None
        self.partitions: dict[str, Partition] = {}
        self.sizes: dict[str, list[int]] = {}
        self.values: dict[str, Tensor] = {}
        self.vectors: dict[str, bool] = {}
        self.starts: dict[str, Start] = {}
        self.redrawn: dict[str, bool] = {}
        self.declared, self.narrow = declared(module, seed), narrow
        for name, parameter in module._parameters.items():
            if parameter is None or not (frozen or parameter.requires_grad):
                continue
            if narrow is not None and name in narrow.owners:
                ids = narrow.partition(name, parameter.shape)
                self.partitions[name] = Partition.from_ids(ids, num_partitions=self.num_partitions).to(parameter.device)
                if self.rule.is_weight(name, parameter):
                    self._note_start(name, parameter, stays=True)
                else:
                    self._note_start_of_vector(name, parameter)
            elif self.rule.is_weight(name, parameter):
                self._divide_weight(name, parameter)
            else:
                self._divide_vector(name, parameter)

    def _divide_weight(self, name: str, weight: nn.Parameter) -> None:
        of_map = self.rule.alike(name) if self.scheme == "node" else self.rule.map_of(name)
        resolved = self._resolved(name, weight)
        partition = self._partition(name, weight, self._seed_of(of_map))
        if weight.is_meta:
            self.sizes[name] = partition.sizes()
        self.partitions[name] = dataclasses.replace(partition.to(weight.device), defaults=resolved)
        if not isinstance(resolved, Stored) and (self.defaults == "seed" or not isinstance(resolved, Zeros)):
            values = resolved.values(weight.shape, weight.dtype, weight.device)
            if (padding := padding_of(self.module, weight)) is not None:
                values = values.clone()
                values[padding] = weight.detach()[padding]
            self.values[name] = values
            is_fresh = weight.requires_grad and self._looks_drawn(name, weight)
            self.redrawn[name] = weight.is_meta or not weight.any() or is_fresh
        is_one = self.num_partitions == 1  # then the distribution of drawn values is nowhere else
        stays = is_one or name not in self.values or isinstance(resolved, Zeros)
        self._note_start(name, self.values.get(name, weight) if is_one else weight, stays)

    def _note_start(self, name: str, weight: nn.Parameter, stays: bool) -> None:
        """Note how a weight started, if it was set to few values, or stays and was not drawn as usual."""
        if self._is_start_known(name, weight):
            entries = drawn_entries(self.module, weight)
            was_set = weight.numel() > 1 and entries.shape == weight.shape and is_of_few_kinds(entries)
            if was_set or (stays and not self._looks_drawn(name, weight)):
                self.starts[name] = Start.of(entries)

    def _partition(self, name: str, weight: Tensor, seed: int) -> Partition:
        if self.scheme == "weight":
            partition = Partition.random(weight.shape, self.proportions, seed=seed)
        else:
            outputs = self.rule.outputs(self.module, name, weight)
            of_outputs = Partition.random((1, int(outputs.max()) + 1), self.proportions, seed=seed).ids()[0]
            partition = Partition.from_ids(
                of_outputs[outputs].expand(weight.shape).contiguous(), num_partitions=self.num_partitions
            )
        padding = padding_of(self.module, weight)
        if padding is None or self.num_partitions == 1:
            return partition
        ids = partition.ids()
        ids[padding] = 1  # it never learns, and stays as it is in every subnetwork
        return Partition.from_ids(ids, num_partitions=self.num_partitions)

    def _resolved(self, name: str, weight: Tensor) -> Defaults:
        if isinstance(self.defaults, Defaults):
            return self.defaults
        if self.defaults == "zero":
            return Zeros()
        if self.defaults == "stored" or (self.declared is None and not self._knows(name)):
            return Stored(weight.detach().clone())
        if self.declared is not None:
            return declared(self.module, self._seed_of(name))
        usual, entries = self.rule.distribution(self.module, name), drawn_entries(self.module, weight)
        if usual is None and not weight.is_meta and is_of_few_kinds(entries):  # a constant, which nobody drew
            return Stored(weight.detach().clone())
        return distribution_of(entries, usual)(seed=self._seed_of(name))

    def _divide_vector(self, name: str, vector: nn.Parameter) -> None:
        self.vectors[name] = name in self.rule.scales
        usual = self._note_start_of_vector(name, vector)
        if usual is not None and self.defaults == "seed":
            drawn = dataclasses.replace(usual(seed=self._seed_of(name)), stream=BIAS_STREAM)
            values = drawn.values((1, vector.numel()), vector.dtype, vector.device)
            self.values[name] = values.clone().view(vector.shape)

    def _note_start_of_vector(self, name: str, vector: nn.Parameter) -> Distribution | None:
        """Note how a vector started, if not as usual; return the distribution that it was drawn from, if it was."""
        if not self._is_start_known(name, vector):
            return None
        is_scale = name in self.rule.scales
        usual = None if is_scale else self.rule.distribution(self.module, name)
        if usual is not None and distribution_of(vector, usual) is usual:
            return usual
        if usual is not None or (vector != float(is_scale)).any():
            self.starts[name] = Start.of(vector)
        return None

    def _knows(self, name: str) -> bool:
        """Return whether it is known how a parameter starts: not so of one that a subclass has added."""
        return self.is_known and self.rule.knows(name)

    def _is_start_known(self, name: str, parameter: Tensor) -> bool:
        return self.declared is None and self._knows(name) and not parameter.is_meta and parameter.numel() > 0

    def _looks_drawn(self, name: str, weight: Tensor) -> bool:
        usual = self.rule.distribution(self.module, name)
        return usual is not None and distribution_of(drawn_entries(self.module, weight), usual) is usual

    def _seed_of(self, name: str) -> int:
        return self.seed if name in ("weight", "bias") else seeds.derived(self.seed, name)

    @torch.no_grad()
    def apply(self) -> None:
        """Partition the module."""
        module, num_partitions = self.module, self.num_partitions
        for name, values in self.values.items():
            module._parameters[name].copy_(values)
        state = PartitionState(num_partitions)
        setattr(module, ATTRIBUTE, state)
        state.starts = self.starts
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in own):
            state.plan = self.plan
        state.lacking = tuple(name for name, parameter in module._parameters.items() if parameter is None)
        if num_partitions == 1:
            return
        state.narrow, state.statistics = self.narrow, self.statistics
        for name, partition in self.partitions.items():
            set_partition(module, name, partition, self.sizes.get(name, ()))
        for name, is_scale in self.vectors.items():
            state.vectors[name] = is_scale
            vector = module._parameters[name].detach()
            rows = torch.full(
                (num_partitions, *vector.shape), float(is_scale), dtype=vector.dtype, device=vector.device
            )
            rows[0] = vector
            module.register_buffer(name + ROWS, rows)
            noted([PartitionedParameter(module, name)])
        for name in self.statistics:
            value, persists = holder_of(module, name)[name].detach(), name not in module._non_persistent_buffers_set
            module.register_buffer(name + ROWS, value.expand(num_partitions, *value.shape).clone(), persistent=persists)
            if not is_norm(state):
                state.initial[name] = value.clone()
        if BATCHES in self.statistics:
            module.register_buffer(ESTIMATED, torch.zeros(2, dtype=torch.int64, device="cpu"))
            hold_statistics(module)
        module.register_buffer(LEARNED, bytes_of(None))
        add_hooks(module)


def set_partition(module: nn.Module, name: str, partition: Partition, sizes: Sequence[int] = ()) -> None:
    """Set which entry of a weight belongs to which partition, and the defaults; on the meta device with its sizes."""
    is_stored, state = isinstance(partition.defaults, Stored), state_of(module)
    state.weights[name] = None if is_stored else partition.defaults
    module.register_buffer(name + MAP, partition.map)
    module.register_buffer(
        name + DEFAULTS, numbers_of(partition.defaults, partition.num_partitions, math.prod(partition.shape))
    )
    if is_stored:
        values = partition.defaults.stored
        if values.is_meta:  # loading a state_dict fills it
            packed = values.new_empty(sum(sizes[1:]))
        else:
            ids = partition.ids()
            packed = torch.cat([values[ids == k] for k in range(2, partition.num_partitions + 1)])
        module.register_buffer(name + STORED, packed)
    state.sums_of_maps.pop(name, None)
    check_map(module, name)


def padding_of(module: nn.Module, weight: Tensor) -> int | None:
    """Return the row of an embedding table for padding, which never learns, or None."""
    padding = getattr(module, "padding_idx", None)
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return padding if is_table and tuple(weight.shape) == (module.num_embeddings, module.embedding_dim) else None


def drawn_entries(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the entries of a weight that its module's initialisation draws."""
    padding = padding_of(module, weight)
    return weight if padding is None else torch.cat([weight[:padding], weight[padding + 1 :]])
