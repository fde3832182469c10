"""PartitionState: the partitions of the parameters and buffers of one module, and its active subnetwork.

The partitions are stored in buffers beside the parameters, so that torch saves, copies and moves them. Each entry of a
weight `name` belongs to a partition:

- `name`: the weight of the active subnetwork; outside of partnets.subnetwork the whole weight.
- `name_partition`: the packed map, uint8 (format 1, see partkernels.formats.packed_map).
- `name_stored`: the defaults of the entries of partitions 2..C, packed, where they are not drawn from a seed.
- `name_defaults`: int64 numbers that define the defaults, such as their seed.

A bias b_1 + ... + b_k and a scale s_1 * ... * s_k have a vector for each partition (Appendix I.2):

- `name`: the vector of the active subnetwork, in the module's usual shape; outside, that of subnetwork C.
- `name_rows`: the vectors of all partitions, [C, ...].

A buffer or frozen parameter that differs between subnetworks, such as a running mean, has `name_rows` as well. The
buffer `learned_from` has PartitionState.learned_from while a state_dict is saved or loaded.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import Defaults, Normal, Partition, Stored, Uniform, Zeros
from partnets.utils.modules import is_sharded, modules_of
from partnets.utils.shards import local, version, whole

ATTRIBUTE = "_partition_state"
# The `update` of a state while examples are in different subnetworks.
PER_EXAMPLE = 0
# The fingerprint of chunks that nobody has reported.
UNKNOWN = ""
ENDS = MAP, DEFAULTS, STORED, ROWS = "_partition", "_defaults", "_stored", "_rows"
# The buffer that counts batches in modules with running statistics.
BATCHES = "num_batches_tracked"
# The buffer that says at which number of batches running statistics were estimated, and with which weights.
ESTIMATED = "statistics_estimated"
# The buffer with the fingerprint of chunks: uint8 [LEARNED_BYTES], see bytes_of.
LEARNED, LEARNED_BYTES = "learned_from", 80
KINDS: tuple[type[Defaults], ...] = (Zeros, Uniform, Normal, Stored)


class Entry:
    """A partnets.subnetwork that modules are in.

    Attributes:
        update: the partition that receives gradients, or None.
        thread: the thread that is inside; None outside of all of them.
        masks: whether gradients are masked as they arrive; False where the optimizer's kernel does that.
        unscaled: scales with gradients that are multiplied by the vectors of other partitions on leaving.
        running: the number of running calls of models, see guard.
    """

    __slots__ = ("masks", "running", "thread", "unscaled", "update")

    def __init__(self, update: int | None, thread: int | None, masks: bool = True) -> None:
        self.update, self.thread, self.masks = update, thread, masks
        self.unscaled: list[Any] = []
        self.running = 0


@functools.cache
def outside(num_partitions: int) -> Entry:
    """Return the entry of modules outside of partnets.subnetwork, where the last partition receives gradients."""
    return Entry(num_partitions, None)


class PartitionState:
    """The partitions of one module.

    Attributes:
        num_partitions: C, the number of partitions.
        weights: the names of parameters whose entries belong to partitions, with their defaults; None where stored.
        vectors: the names of parameters with a vector for each partition; whether these are multiplied, not added.
        statistics: the names of buffers and frozen parameters with a separate value for each subnetwork.
        wholes: the names of parameters that one partition owns completely, with its number, as in partnets.Ensemble.
        lacking: the names of parameters that the module was partitioned without, such as a bias.
        active: k, the subnetwork that the module is; C outside of partnets.subnetwork.
        entry: the innermost partnets.subnetwork that the module is in.
    """

    # What copies and pickles have.
    KEPT = (
        "weights",
        "vectors",
        "statistics",
        "wholes",
        "lacking",
        "narrow",
        "starts",
        "initial",
        "sums_of_maps",
        "learned_from",
        "plan",
    )

    def __init__(self, num_partitions: int) -> None:
        self.num_partitions = num_partitions
        self.weights: dict[str, Defaults | None] = {}
        self.vectors: dict[str, bool] = {}
        self.statistics: tuple[str, ...] = ()
        self.wholes: dict[str, int] = {}
        self.lacking: tuple[str, ...] = ()
        # How nested channels narrow the module, and its whole parameters and attributes while it is narrow.
        self.narrow: Any = None
        self.base: dict[str, Any] = {}
        # Whether torch gathers the module's parameters from shards for each call, as by distributed.fully_shard.
        self.is_gathered = False
        # Initial distributions of parameters where they are not torch's; initial statistics of stateful modules.
        self.starts: dict[str, Any] = {}
        self.initial: dict[str, Tensor] = {}
        self.active: int = num_partitions
        self.entry = outside(num_partitions)
        # The subnetwork that computed last, and the partition that learned: see guard.
        self.called: tuple[int, int | None] = num_partitions, num_partitions
        # The address and version of the buffers that `weights` was read from, by the weights' names.
        self.defaults_read: dict[str, tuple[int, int]] = {}
        # The sums of maps by the weights' names, to see whether others have written into them; shared by tied weights.
        self.sums_of_maps: dict[str, dict[str, int]] = {}
        # What Switch exchanges, by the parameter's name: the same for all models that the module is in.
        self.exchanged: dict[str, Any] = {}
        # The fingerprint of the chunks that the module has learned from; None before its first step.
        self.learned_from: str | None = None
        # The arguments of Assignment, to partition the module again once it has left the meta device.
        self.plan: dict[str, Any] = {}
        # The partitions that have been `update` since their last step, for the optimizers.
        self.learned: set[int] = set()
        # The versions of parameters and rows after partnets last wrote into them, to find other writes: see noted.
        self.versions: dict[str, tuple[int, int, int]] = {}
        # Gradients of vectors of other partitions than that which `.grad` is of, by name and partition; the partition
        # that `.grad` is of, and what it was then: see gradients.
        self.grads: dict[str, dict[int, Tensor]] = {}
        self.grad_of: dict[str, int] = {}
        self.grad_seen: dict[str, tuple[int, int, Tensor | None]] = {}
        # The names and partitions of these gradients that were changed since their backward pass, such as by clipping.
        self.grads_changed: set[tuple[str, int]] = set()
        # The names of scales with gradients that must still be multiplied by the vectors of other partitions, with the
        # active subnetwork and the partition that learned.
        self.unscaled: dict[str, tuple[int, int]] = {}

    @property
    def update(self) -> int | None:
        """The partition that receives gradients, or None; C outside of partnets.subnetwork."""
        return self.entry.update

    def buffers(self) -> set[str]:
        """Return the names of the buffers that partitions add to a module; it may lack some."""
        names = (*self.weights, *self.vectors, *self.statistics)
        return {name + end for name in names for end in ENDS} | {ESTIMATED, LEARNED}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.entry.thread is not None or self.active != self.num_partitions:
            raise RuntimeError(
                f"the model is subnetwork {self.active} now; copy or save it outside of partnets.subnetwork."
            )
        return PartitionState, (self.num_partitions,), {name: getattr(self, name) for name in self.KEPT}


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter of the whole network, also while the module has a narrow part of it.

    Raises:
        RuntimeError: the module has no such parameter any more.
    """
    state = vars(module).get(ATTRIBUTE)
    found = module._parameters.get(name) if state is None else state.base.get(name, module._parameters.get(name))
    if found is None:
        raise RuntimeError(
            f"the {name} of this {type(module).__name__} is computed from other parameters now, which no partition"
            " owns; parametrize and prune modules before partnets.partition."
        )
    return found


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the dict of a module that holds one of its buffers or parameters."""
    return module._buffers if name in module._buffers else module._parameters


def state_of(module: nn.Module) -> PartitionState | None:
    """Return how a module's own parameters are partitioned, or None if they are not."""
    return vars(module).get(ATTRIBUTE)


def partitioned_modules(model: nn.Module, modules: list[nn.Module] | None = None) -> list[nn.Module]:
    """Return the modules of a model that have a PartitionState, each once, in the order of model.modules().

    Args:
        model: the model.
        modules: modules_of(model), if they are known.
    """
    return [module for module in modules or modules_of(model) if ATTRIBUTE in module.__dict__]


def is_norm(state: PartitionState) -> bool:
    """Return whether statistics are those of torch's norms, which change in training mode only."""
    return set(state.statistics) == {"running_mean", "running_var", BATCHES}


def held_statistics(
    modules: Iterable[nn.Module], *, rows: bool = False
) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Return the statistics of the active subnetwork with copies, for `put_back`; with `rows`, those of all of them."""
    found = []
    for module in modules:
        for name in state_of(module).statistics:
            for each in (name, name + ROWS) if rows else (name,):
                own = holder_of(module, each)
                if own.get(each) is not None:
                    found.append((own, each, own[each], own[each].detach().clone()))
    return found


@torch.no_grad()
def put_back(held: list[tuple[dict[str, Any], str, Tensor, Tensor]]) -> None:
    """Restore statistics, also where the module's code has assigned other tensors."""
    for own, name, tensor, value in held:
        if own.get(name) is not tensor:
            own[name] = tensor
        tensor.copy_(value)


def num_partitions(model: nn.Module) -> int:
    """Return C, the number of partitions of a model.

    Raises:
        ValueError: the model is not partitioned, or its modules differ in C.
    """
    return agreed_num_partitions(model, map(state_of, partitioned_modules(model)))


def agreed_num_partitions(model: nn.Module, states: Iterable[PartitionState]) -> int:
    """Return num_partitions(model) by the states of its modules."""
    counts = {state.num_partitions for state in states}
    if not counts:
        raise ValueError(
            f"this {type(model).__name__} has no partitions; make them with partnets.partition(model, proportions)."
        )
    if len(counts) > 1:
        raise ValueError(f"the modules differ in their number of partitions, {sorted(counts)}; partition all alike.")
    return counts.pop()


def partition_of(module: nn.Module, name: str) -> Partition:
    """Return the partition of a weight, with its defaults. If they are sharded, all ranks must call this.

    Args:
        module: one with a PartitionState.
        name: that of a weight in it, such as "weight".
    """
    defaults, map = defaults_of_weight(module, name), whole(module._buffers[name + MAP])
    return Partition._unchecked(tuple(parameter_of(module, name).shape), state_of(module).num_partitions, map, defaults)


def defaults_of_weight(module: nn.Module, name: str) -> Defaults:
    """Return the defaults of a weight. If they are stored and sharded, all ranks must call this."""
    state, weight = state_of(module), parameter_of(module, name)
    read_defaults(module, name)
    if (defaults := state.weights[name]) is not None:
        return defaults
    map, stored = (whole(module._buffers[name + end]) for end in (MAP, STORED))
    partition = Partition._unchecked(tuple(weight.shape), state.num_partitions, map, Zeros())
    ids, values = partition.ids(), torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    for k, of_k in enumerate(stored.split(partition.sizes()[1:]), 2):
        values[ids == k] = of_k
    return Stored(values)


def read_defaults(module: nn.Module, name: str) -> None:
    """Take a weight's defaults from their buffer if it was written into, such as by a file of another place of it."""
    state, buffer = state_of(module), module._buffers[name + DEFAULTS]
    numbers = local(buffer)
    key = numbers.data_ptr(), version(buffer)
    if not numbers.is_meta and key != state.defaults_read.get(name):
        state.weights[name], state.defaults_read[name] = defaults_of(numbers), key


def check_map(module: nn.Module, name: str) -> None:
    """Raise RuntimeError if a weight's map or numbers were written into, other than by load_state_dict."""
    map, numbers = module._buffers[name + MAP], module._buffers[name + DEFAULTS]
    if map.is_meta or is_sharded(map) or is_sharded(numbers):
        return
    known = state_of(module).sums_of_maps.setdefault(name, {})
    present = int(map.sum(dtype=torch.int64)), numbers.tolist()
    if known.setdefault("sum", present) != present:
        raise RuntimeError(
            f"{name}{MAP} of a {type(module).__name__}, the partitions of the weight, or its defaults were written"
            " into; for an average, average partnets.merge(model) instead of the model; after to_empty, load a"
            " state_dict."
        )


def numbers_of(defaults: Defaults, num_partitions: int, entries: int) -> Tensor:
    """Return a weight's defaults as the six int64 numbers that a state_dict stores; the inverse is `defaults_of`.

    They are the kind (an index of KINDS), the bits of the scale or standard deviation as a float64, the seed, the
    stream, the number of partitions `num_partitions`, and the number of the weight's entries.
    """
    scale = getattr(defaults, "scale", getattr(defaults, "std", 0.0))
    (bits,) = struct.unpack("<q", struct.pack("<d", scale))
    values = KINDS.index(type(defaults)), bits, getattr(defaults, "seed", 0), getattr(defaults, "stream", 0)
    return torch.tensor([*values, num_partitions, entries], dtype=torch.int64, device="cpu")


def defaults_of(numbers: Tensor) -> Defaults | None:
    """Return the defaults that `numbers_of` encoded; None for stored defaults.

    Raises:
        ValueError: the kind is unknown.

    Example:
        >>> defaults_of(numbers_of(Uniform(0.5, seed=3), num_partitions=2, entries=12))
        Uniform(scale=0.5, seed=3, stream=0)
    """
    kind, bits, seed, stream, *_ = numbers.tolist()
    if not 0 <= kind < len(KINDS):
        raise ValueError(f"the saved defaults are of kind {kind}; known are 0 to {len(KINDS) - 1}.")
    if KINDS[kind] is Stored:
        return None
    if KINDS[kind] is Zeros:
        return Zeros()
    (scale,) = struct.unpack("<d", struct.pack("<q", bits))
    return KINDS[kind](scale, seed, stream)


def bytes_of(text: str | None) -> Tensor:
    """Return a short text, or None, as bytes: 1 + the number of its bytes, the bytes, and zeros.

    Example:
        >>> bytes_of("ab")[:4].tolist(), text_of(bytes_of("ab")), text_of(bytes_of(None))
        ([3, 97, 98, 0], 'ab', None)
    """
    encoded = b"" if text is None else bytes([1 + len(text.encode())]) + text.encode()
    return torch.tensor(list(encoded.ljust(LEARNED_BYTES, b"\0")), dtype=torch.uint8, device="cpu")


def text_of(encoded: Tensor) -> str | None:
    """Return the text of such bytes.

    Raises:
        ValueError: bytes_of has not made them.
    """
    size, *content = encoded.tolist()
    if size > len(content) + 1:
        raise ValueError(f"the saved learned_from begins with {size}; it must be at most {len(content) + 1}.")
    return bytes(content[: size - 1]).decode() if size else None


def weights_of(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and name of each partitioned weight; of tied ones the first."""
    seen = set()
    for module in partitioned_modules(model):
        for name in state_of(module).weights:
            if id(parameter_of(module, name)) not in seen:
                seen.add(id(parameter_of(module, name)))
                yield module, name


def inside(model: nn.Module) -> bool:
    """Return whether a model is inside of partnets.subnetwork, or left in a subnetwork."""
    states = [state_of(module) for module in partitioned_modules(model)]
    return any(state.entry.thread is not None or state.active != state.num_partitions for state in states)


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Return the partition of each partitioned weight, by the weight's dotted name.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5))
        >>> partnets.partitions(model)["0.weight"].sizes()
        [6, 6]
    """
    return {
        f"{path}.{name}".lstrip("."): partition_of(module, name)
        for path, module in model.named_modules()
        if (state := state_of(module)) is not None
        for name in state.weights
    }
