"""divide: gives a module's parameters partitions, and the buffers that hold them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partkernels import Defaults, Partition, Stored, Zeros
from partkernels.arguments import sizes
from partnets.subnetworks.channels import Narrow
from partnets.subnetworks.initial_values import Distribution, Start, declared, distribution_of, is_of_few_kinds
from partnets.subnetworks.parameters import PartitionedParameter
from partnets.subnetworks.rules import Rule, known_rule, rule_of
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
    defaults_of,
    holder_of,
    numbers_of,
    parameter_of,
    read_defaults,
    text_of,
)
from partnets.subnetworks.statistics import UNKNOWN_AT, hold_statistics
from partnets.subnetworks.switch import noted, version_of
from partnets.utils import seeds
from partnets.utils.modules import is_sharded
from partnets.utils.shards import local, version

# The stream of a weight's defaults is 0; a bias is drawn from another, so that the two are independent.
BIAS_STREAM = 1
SCHEMES = ("weight", "node")


class Division:
    """How a module is to be partitioned; nothing changes before `apply`.

    Args:
        module: not partitioned yet.
        proportions: C numbers that sum to 1.
        seed: that of this module.
        defaults: 'seed', 'zero', 'stored' or one of partkernels' Defaults.
        scheme: 'weight' or 'node'.
        frozen: whether parameters that require no gradient are partitioned as well.
        statistics: the names of buffers and frozen parameters that each subnetwork has of its own.
        rule: that of the module's type if None.
        narrow: how nested channels narrow the module; None if they do not.

    Attributes:
        redrawn: the names of weights that get new values, and whether the old ones look like a fresh draw.
    """

    def __init__(
        self,
        module: nn.Module,
        proportions: Sequence[float],
        *,
        seed: int,
        defaults: str | Defaults = "seed",
        scheme: str = "weight",
        frozen: bool = False,
        statistics: Sequence[str] = (),
        rule: Rule | None = None,
        narrow: Narrow | None = None,
    ) -> None:
        sizes(0, proportions)
        if scheme not in SCHEMES:
            raise ValueError(f"scheme={scheme!r}; pass 'weight' or 'node', or 'nested' to partnets.partition.")
        self.module, self.proportions, self.count, self.seed = module, proportions, len(proportions), seed
        self.defaults, self.scheme, self.statistics = defaults, scheme, tuple(statistics)
        self.rule = rule_of(type(module)) if rule is None else rule
        self.is_known = rule is not None or known_rule(type(module)) is not None
        self.partitions: dict[str, Partition] = {}
        self.values: dict[str, Tensor] = {}
        self.vectors: dict[str, bool] = {}
        self.starts: dict[str, Start] = {}
        self.redrawn: dict[str, bool] = {}
        self.declared, self.narrow = declared(module, seed), narrow
        for name, parameter in module._parameters.items():
            if parameter is None or not (frozen or parameter.requires_grad):
                continue
            if not parameter.is_floating_point():
                raise TypeError(
                    f"the {name} is {parameter.dtype}; pass a dtype of real numbers, such as torch.float32."
                )
            if narrow is not None and name in narrow.owners:
                ids = narrow.partition(name, parameter.shape)
                self.partitions[name] = Partition.from_ids(ids, count=self.count).to(parameter.device)
                if self.rule.is_weight(name, parameter):
                    self._note_start(name, parameter, stays=True)
                else:
                    self._note_start_of_vector(name, parameter)
            elif self.rule.is_weight(name, parameter):
                self._divide_weight(name, parameter)
            else:
                self._divide_vector(name, parameter)

    def _divide_weight(self, name: str, weight: nn.Parameter) -> None:
        own = self.seed_of(name)
        of_map = self.rule.alike(name) if self.scheme == "node" else self.rule.map_of(name)
        partition = self._partition(name, weight, self.seed_of(of_map)).to(weight.device)
        resolved = self._resolved(name, weight, own)
        self.partitions[name] = dataclasses.replace(partition, defaults=resolved)
        is_drawn = self.defaults == "seed" or not (isinstance(resolved, Zeros) or self.defaults == "stored")
        has_values = is_drawn and not isinstance(resolved, Stored)
        if has_values:
            values = resolved.values(weight.shape, weight.dtype, weight.device)
            if (padding := padding_of(self.module, weight)) is not None:
                values = values.clone()
                values[padding] = weight.detach()[padding]
            self.values[name] = values
            usual = self.rule.distribution(self.module, name)
            looks = distribution_of(drawn_entries(self.module, weight), usual) is usual and usual is not None
            self.redrawn[name] = weight.is_meta or not weight.any() or (weight.requires_grad and looks)
        self._note_start(name, weight, stays=not has_values or isinstance(resolved, Zeros))

    def _note_start(self, name: str, weight: nn.Parameter, stays: bool) -> None:
        """Note how a weight started, if it was set to few values, or stays and was not drawn as usual."""
        if self.declared is not None or not self._knows(name) or weight.is_meta or not weight.numel():
            return
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
            partition = Partition.from_ids(of_outputs[outputs].expand(weight.shape).contiguous(), count=self.count)
        padding = padding_of(self.module, weight)
        if padding is None or self.count == 1:
            return partition
        ids = partition.ids()
        ids[padding] = 1  # it never learns, and stays as it is in every subnetwork
        return Partition.from_ids(ids, count=self.count)

    def _resolved(self, name: str, weight: Tensor, seed: int) -> Defaults:
        if self.defaults == "seed":
            if self.declared is not None:
                return declared(self.module, seed)
            if not self._knows(name):
                return Stored(weight.detach().clone())
            usual = self.rule.distribution(self.module, name)
            return distribution_of(drawn_entries(self.module, weight), usual)(seed=seed)
        if self.defaults == "zero":
            return Zeros()
        if self.defaults == "stored":
            return Stored(weight.detach().clone())
        if isinstance(self.defaults, Defaults):
            return self.defaults
        raise ValueError(
            f"defaults={self.defaults!r}; pass 'seed', 'zero', 'stored', or one of partkernels' Zeros, Uniform, Normal,"
            " Stored."
        )

    def _divide_vector(self, name: str, vector: nn.Parameter) -> None:
        self.vectors[name] = name in self.rule.scales
        usual = self._note_start_of_vector(name, vector)
        if usual is not None and self.defaults == "seed":
            drawn = dataclasses.replace(usual(seed=self.seed_of(name)), stream=BIAS_STREAM)
            values = drawn.values((1, vector.numel()), vector.dtype, vector.device)
            self.values[name] = values.clone().view(vector.shape)

    def _note_start_of_vector(self, name: str, vector: nn.Parameter) -> Distribution | None:
        """Note how a vector started, if not as usual; return the distribution that it was drawn from, if it was."""
        if not self._knows(name) or self.declared is not None or vector.is_meta or not vector.numel():
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

    def _looks_drawn(self, name: str, weight: Tensor) -> bool:
        usual = self.rule.distribution(self.module, name)
        return distribution_of(drawn_entries(self.module, weight), usual) is usual

    def seed_of(self, name: str) -> int:
        """Return the seed of one of the module's parameters."""
        return self.seed if name in ("weight", "bias") else seeds.derived(self.seed, name)

    @torch.no_grad()
    def apply(self) -> None:
        """Partition the module."""
        module, count = self.module, self.count
        for name, values in self.values.items():
            module._parameters[name].copy_(values)
        state = PartitionState(count, {}, {}, ())
        state.starts = self.starts
        state.narrow = self.narrow if count > 1 else None
        if count > 1:
            vars(module)[ATTRIBUTE] = state
            for name, partition in self.partitions.items():
                set_partition(module, name, partition)
            for name, is_scale in self.vectors.items():
                state.vectors[name] = is_scale
                module.register_buffer(name + ROWS, with_rows(module._parameters[name], count, float(is_scale)))
                noted([PartitionedParameter(module, name)])
            state.statistics = self.statistics
            for name in self.statistics:
                value, persists = holder_of(module, name)[name].detach(), name not in module._non_persistent_buffers_set
                module.register_buffer(name + ROWS, value.expand(count, *value.shape).clone(), persistent=persists)
                if name not in self.rule.statistics:
                    state.initial[name] = value.clone()
            if BATCHES in self.statistics:
                module.register_buffer(ESTIMATED, torch.zeros(2, dtype=torch.int64, device="cpu"))
            module.register_buffer(LEARNED, bytes_of(None))
            module.register_load_state_dict_pre_hook(before_loading)
            module.register_load_state_dict_post_hook(after_loading)
            module.register_state_dict_pre_hook(before_saving)
        vars(module)[ATTRIBUTE] = state
        if BATCHES in state.statistics:
            hold_statistics(module)


def set_partition(module: nn.Module, name: str, partition: Partition) -> None:
    """Set which entry of a weight belongs to which partition, and the defaults."""
    is_stored = isinstance(partition.defaults, Stored)
    vars(module)[ATTRIBUTE].weights[name] = None if is_stored else partition.defaults
    module.register_buffer(name + MAP, partition.map)
    module.register_buffer(name + DEFAULTS, numbers_of(partition.defaults, partition.count, math.prod(partition.shape)))
    if is_stored:
        values = partition.defaults.stored
        if values.is_meta:  # loading a state_dict gives it its size
            packed = values.new_empty(0)
        else:
            ids = partition.ids()
            packed = torch.cat([values[ids == k] for k in range(2, partition.count + 1)])
        module.register_buffer(name + STORED, packed)
    vars(module)[ATTRIBUTE].sums_of_maps.pop(name, None)
    check_map(module, name)


def with_rows(vector: Tensor, count: int, neutral: float) -> Tensor:
    """Return [count, ...] with a vector first, and `neutral` in all other rows."""
    rows = torch.full((count, *vector.shape), neutral, dtype=vector.dtype, device=vector.device)
    rows[0] = vector.detach()
    return rows


def is_nested_map(module: nn.Module, name: str, map: Tensor) -> bool:
    """Return whether a map is that of nested channels; the buffer may have been loaded into already."""
    state = vars(module)[ATTRIBUTE]
    ids = state.narrow.partition(name, parameter_of(module, name).shape)
    return torch.equal(map.cpu(), Partition.from_ids(ids, count=state.count).map)


def before_loading(module: nn.Module, state_dict: dict, prefix: str, *rest) -> None:
    """Give the buffers of stored defaults the sizes that a state_dict has; it may have other partitions or defaults.

    Damaged maps are added to the errors that torch's load_state_dict raises.
    """
    state = vars(module).get(ATTRIBUTE)
    if state is not None:
        for known in state.sums_of_maps.values():
            known.clear()
    *_, errors = rest
    for name in () if state is None else state.weights:
        map, own = state_dict.get(prefix + name + MAP), module._buffers[name + MAP]
        if isinstance(map, Tensor) and not is_sharded(map) and not is_sharded(own) and map.shape == own.shape:
            try:
                Partition(tuple(parameter_of(module, name).shape), state.count, map.contiguous(), Zeros())
            except ValueError as error:
                errors.append(f"{prefix}{name}{MAP}: {error}")
            if state.narrow is not None and name in state.narrow.owners and not is_nested_map(module, name, map):
                raise RuntimeError(
                    f"{prefix}{name}{MAP} has other partitions than those of this model's nested channels; partition"
                    " the model as the saved one was."
                )
        numbers = state_dict.get(prefix + name + DEFAULTS)
        if prefix + name in state_dict and not (isinstance(map, Tensor) and isinstance(numbers, Tensor)):
            errors.append(
                f"{prefix}{name} comes without {prefix}{name}{MAP} or {DEFAULTS}, so its entries would belong to other"
                " partitions than they learned in; load weights of a dense model before partnets.partition."
            )
        if isinstance(numbers, Tensor) and not is_sharded(numbers) and numbers.shape == (6,) and not numbers.is_meta:
            if (count := int(numbers[4])) != state.count:
                errors.append(f"{prefix}{name}{MAP} has {count} partitions; this model has {state.count}.")
            if defaults_of(numbers) is None and not isinstance(state_dict.get(prefix + name + STORED), Tensor):
                errors.append(f"{prefix}{name}{STORED} is missing, the stored defaults of {prefix}{name}.")
        if isinstance(numbers, Tensor):
            own, saved = module._buffers.get(name + STORED), state_dict.get(prefix + name + STORED)
            if not isinstance(saved, Tensor):
                module._buffers.pop(name + STORED, None)
            elif own is None or own.shape != saved.shape:
                room = local(module._parameters[name]).new_empty(saved.shape, requires_grad=False)
                module.register_buffer(name + STORED, room)
    names = [] if state is None else [prefix + name + end for name in state.statistics for end in ("", ROWS)]
    if prefix + ESTIMATED in state_dict and any(name not in state_dict for name in names):
        del state_dict[prefix + ESTIMATED]  # the statistics that stay are of other weights
        module._buffers[ESTIMATED].fill_(UNKNOWN_AT)
    if state is not None and prefix + LEARNED not in state_dict:
        local(module._buffers[LEARNED]).copy_(bytes_of(state.learned_from))


def after_loading(module: nn.Module, incompatible_keys) -> None:
    """Take the defaults and the fingerprint of chunks that a state_dict had."""
    if (state := vars(module).get(ATTRIBUTE)) is None:
        return
    for name in state.weights:
        read_defaults(module, name)
        check_map(module, name)
    if not module._buffers[LEARNED].is_meta:
        state.learned_from = text_of(local(module._buffers[LEARNED]))


def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Write the fingerprint of chunks into its buffer; raise RuntimeError while a subnetwork is active."""
    if (state := vars(module).get(ATTRIBUTE)) is None:
        return
    if state.thread is not None or state.active != state.count:
        raise RuntimeError(
            f"the model is subnetwork {state.active} now, whose state_dict lacks the entries of other partitions; take"
            " it outside of partnets.subnetwork."
        )
    with torch.no_grad():
        local(module._buffers[LEARNED]).copy_(bytes_of(state.learned_from))
        for name in state.weights:
            check_map(module, name)
        for name in state.vectors:  # whose rows may have been written into
            one, before = PartitionedParameter(module, name), state.versions.get(name)
            if before is not None and before[0] == version(one.parameter) and before != version_of(one):
                one.combine()
                noted([one])
        for name in state.statistics:
            module._buffers[name + ROWS][-1].copy_(holder_of(module, name)[name])


def padding_of(module: nn.Module, weight: Tensor) -> int | None:
    """Return the row of a table that stands for padding, and never learns; None if it has none."""
    padding = getattr(module, "padding_idx", None)
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return padding if is_table and tuple(weight.shape) == (module.num_embeddings, module.embedding_dim) else None


def drawn_entries(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the entries of a weight that its module's initialisation draws."""
    padding = padding_of(module, weight)
    return weight if padding is None else torch.cat([weight[:padding], weight[padding + 1 :]])
