"""Switch: makes a model one of its subnetworks by exchanging the entries that differ, in place."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from partkernels import Partition, Zeros
from partkernels.backend import dispatch
from partkernels.operators.entries import Exchange, combine_rows
from partkernels.operators.subnetwork_weight import select
from partnets.subnetworks.channels import narrow_to, widen
from partnets.subnetworks.guard import guard, guard_calls
from partnets.subnetworks.state import (
    ATTRIBUTE,
    DEFAULTS,
    MAP,
    PER_EXAMPLE,
    ROWS,
    STORED,
    PartitionState,
    check_map,
    held_statistics,
    holder_of,
    is_norm,
    num_partitions,
    parameter_of,
    partition_of,
    partitioned_modules,
    state_of,
)
from partnets.utils.modules import is_sharded, overlapping
from partnets.utils.shards import local, local_partition, part, sharded_like, version

INT32_MAX = 2**31 - 1
# The devices on which vectors are compared with their rows at each entry; a GPU would have to be waited for.
COMPARED = ("cpu",)


class Exchanged:
    """A parameter that differs between subnetworks; it keeps nothing alive but memory.

    Attributes:
        module, name: where the parameter is; of a tied one the first place.
        state: the module's.
        parameter: that of the whole network.
        whole: the parameter's memory, to see whether it was replaced; it shares the parameter's version.
        hooked: the numbers of the parameters, of the network or gathered from its shards, whose gradients are masked.
    """

    def __init__(self, module: nn.Module, name: str, state: PartitionState, parameter: nn.Parameter) -> None:
        self.name, self.versions, self.hooked = name, state.versions, set()
        self.whole: Tensor | None = None
        # The key of the hook of the parameter's gradients.
        self.hook: int | None = None
        self._watched: tuple[Tensor, Tensor | None] | None = None
        self._module, self._state, self._parameter = weakref.ref(module), weakref.ref(state), weakref.ref(parameter)

    @property
    def module(self) -> nn.Module:
        return self._module()

    @property
    def state(self) -> PartitionState | None:
        return self._state()

    @property
    def parameter(self) -> nn.Parameter:
        return self._parameter()

    def hold(self) -> None:
        """Take the parameter's present memory for right."""
        parameter, rows = self.parameter, self.module._buffers.get(self.name + ROWS)
        self.whole = local(parameter).detach()
        tensors = [parameter] if rows is None else [parameter, rows]
        is_plain = not any(is_sharded(tensor) or tensor.is_inference() for tensor in tensors)
        self._watched = (self.whole, rows) if is_plain else None

    def note(self) -> None:
        """Take what was written into the parameter for right."""
        self.versions[self.name] = self.version()

    def is_noted(self) -> bool:
        """Return whether nothing was written into the parameter, or its vectors, since `note`."""
        return self.version() == self.versions.get(self.name)

    def version(self) -> tuple[int, int]:
        if self._watched is None:
            return version_of(self)
        whole, rows = self._watched
        return whole._version, 0 if rows is None else rows._version


class Weight(Exchanged):
    """One partitioned weight, and what is exchanged with it.

    Attributes:
        memory: the parameter as one dimension, in the order of its memory.
        places: where the entries of partition 2 are in `memory`, then those of 3, ..., C: int32, or int64 if needed.
        defaults: the value of each of these while its partition is not active.
        learned: the learned value of each, valid while its partition is not active.
        starts: where each partition 2..C begins in these three, and where the last one ends.
        key: what all of this was made of.
        made: how often it was made.
    """

    def __init__(self, *of) -> None:
        super().__init__(*of)
        self.memory: Tensor | None = None
        self.places: Tensor | None = None
        self.defaults: Tensor | None = None
        self.learned: Tensor | None = None
        self.starts: list[int] = []
        self.key: tuple = ()
        self.made = 0
        self._map: tuple[tuple, Tensor | None] = (), None

    @property
    def is_narrow(self) -> bool:
        """Return whether a subnetwork has a part of the parameter, so that nothing is exchanged."""
        return self.state.narrow is not None and self.name in self.state.narrow.owners

    def refresh(self) -> None:
        """Make memory, places and values anew if parameter, map or defaults have changed; for a DTensor this rank's."""
        parameter, buffers = local(self.parameter), self.module._buffers
        map, stored = buffers[self.name + MAP], buffers.get(self.name + STORED)
        numbers = buffers[self.name + DEFAULTS]
        key = (
            parameter.data_ptr(), parameter.dtype, parameter.stride(), local(map).data_ptr(), version(map),
            local(numbers).data_ptr(), version(numbers),
            None if stored is None else (local(stored).data_ptr(), version(stored)),
        )  # fmt: skip
        if key == self.key:
            return
        if map.is_meta:
            raise RuntimeError(
                f"the {self.name} of a {type(self.module).__name__} is on the meta device, without values; call"
                " model.to_empty(device=...) and load a state_dict before a subnetwork is entered."
            )
        check_map(self.module, self.name)
        if not (is_sharded(self.parameter) or is_sharded(map)):
            try:
                if not numbers.is_meta and int(numbers[5]) != self.parameter.numel():
                    raise ValueError(f"it has {self.parameter.numel()} entries instead of {int(numbers[5])}.")
                Partition(tuple(self.parameter.shape), self.state.count, map, Zeros())
            except ValueError as error:
                raise ValueError(
                    f"the {self.name} of a {type(self.module).__name__} does not fit its partitions, {self.name}{MAP}:"
                    f" {error} Resize parameters before partnets.partition; after to_empty, load a state_dict."
                ) from error
        with torch.no_grad():
            partition = partition_of(self.module, self.name)
            self.memory = in_memory(parameter.detach(), parameter)
            if self.memory is None:
                raise ValueError(
                    f"{self.name} of {type(self.module).__name__} has gaps in memory, strides {parameter.stride()} of"
                    f" shape {tuple(parameter.shape)}; make it contiguous before partnets.partition."
                )
            defaults = partition.defaults.values(partition.shape, parameter.dtype, parameter.device)
            ids, defaults = (
                in_memory(part(whole, self.parameter), parameter)
                for whole in (partition.ids().to(parameter.device), defaults)
            )
            index = torch.int32 if parameter.numel() <= INT32_MAX else torch.int64
            found = [(ids == k).nonzero().view(-1) for k in range(2, self.state.count + 1)]
            self.starts = [0, *itertools.accumulate(len(places) for places in found)]
            places = torch.cat(found) if found else ids.new_zeros(0, dtype=torch.int64)
            self.places, self.defaults = places.to(index), defaults[places]
            self.learned = torch.empty_like(self.defaults)
        self.key = key
        self.made += 1

    def map_of(self, grad: Tensor) -> Tensor | None:
        """Return the map of the weight, or of this rank's part of a gradient that is a DTensor; None if it is empty."""
        buffer = self.module._buffers[self.name + MAP]
        map = local(buffer)
        if not is_sharded(grad):
            return map
        key = map.data_ptr(), version(buffer), grad.placements, grad.device
        if key != self._map[0]:
            partition = Partition._unchecked(tuple(grad.shape), self.state.count, map, Zeros())
            own = local_partition(partition, grad)
            self._map = key, None if own is None else own.map
        return self._map[1]


def in_memory(tensor: Tensor, like: Tensor) -> Tensor | None:
    """Return a tensor of like's shape as one dimension, in the order of like's memory; None if that has gaps."""
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    order = [d for d in order if like.shape[d] != 1]
    expected = 1
    for d in reversed(order):
        if like.stride(d) != expected:
            return None
        expected *= like.shape[d]
    rest = [d for d in range(like.dim()) if like.shape[d] == 1]
    permuted = tensor.permute(*rest, *order)
    return permuted.reshape(-1) if tensor.data_ptr() != like.data_ptr() else permuted.view(-1)


class Vector(Exchanged):
    """A parameter with a vector for each partition, added or multiplied."""

    def __init__(self, *of, is_product: bool) -> None:
        super().__init__(*of)
        self.is_product = is_product

    @property
    def rows(self) -> Tensor:
        return local(self.module._buffers[self.name + ROWS])

    def combined(self) -> Tensor:
        """Return the vector of the whole network; of a DTensor this rank's part."""
        whole = torch.empty_like(self.rows[0])
        combine_rows([whole], [self.rows], self.state.count, [self.is_product])
        return part(whole, self.parameter).to(self.parameter.device)

    def check_shape(self) -> None:
        """Raise ValueError if the parameter was resized."""
        shape, rows = tuple(self.parameter.shape), self.module._buffers[self.name + ROWS]
        if shape != tuple(rows.shape[1:]) and not is_sharded(self.parameter):
            raise ValueError(
                f"the {self.name} of a {type(self.module).__name__} has shape {shape}, and its vectors"
                f" {tuple(rows.shape[1:])}; resize parameters before partnets.partition."
            )


class Switch:
    """All that differs between the subnetworks of a model.

    Args:
        model: what the modules are in.
        modules: those with a PartitionState.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        self._model, self._modules = weakref.ref(model), [weakref.ref(module) for module in modules]
        self.states = [state_of(module) for module in modules]
        self._ids = {id(state) for state in self.states}
        found: dict[int, Weight | Vector] = {}
        self._aliases: list[tuple[weakref.ref, str, nn.Parameter]] = []
        self.wholes: list[tuple[nn.Parameter, int]] = []
        for module, state in zip(modules, self.states, strict=True):
            for name, owner in state.wholes.items():
                self.wholes.append((parameter_of(module, name), owner))
            for name in (*state.weights, *state.vectors):
                parameter = parameter_of(module, name)
                self._aliases.append((weakref.ref(module), name, parameter))
                if id(parameter) not in found:
                    found[id(parameter)] = self._exchanged_of(module, name, parameter)
                state.exchanged[name] = found[id(parameter)]
        self.weights = [one for one in found.values() if isinstance(one, Weight)]
        self.vectors = [one for one in found.values() if isinstance(one, Vector)]
        self.exchanged = [*self.weights, *self.vectors]
        self.count = num_partitions(model)
        of_state = list(zip(self._modules, self.states, range(len(modules)), strict=True))
        self._with_statistics = [(module, i) for module, state, i in of_state if state.statistics]
        self._narrow = [module for module, state, _ in of_state if state.narrow is not None]
        self._is_guarded = False
        # Whether the model stays in a subnetwork that is left, until the next one is entered.
        self.is_resident = False
        self._lists: dict[tuple[int, int], tuple] = {}
        self._made_of: list = []
        self._factors: dict[tuple, tuple] = {}
        self._check_of: tuple[list[Vector], list[Tensor], Exchange] = [], [], Exchange()

    def _exchanged_of(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Weight | Vector:
        """Return what is exchanged with a parameter: what another model with this module has, if there is one."""
        state = state_of(module)
        known = state.exchanged.get(name)
        if known is not None and known.parameter is parameter and id(known.state) in self._ids:
            return known
        if known is not None and is_sharded(known.parameter) and not is_sharded(parameter):
            raise RuntimeError(
                f"the {name} of a {type(module).__name__} is still gathered from its shards; call reshard() of the"
                " modules that torch has sharded first."
            )
        if known is not None and state.thread is not None:
            raise RuntimeError(
                f"the {name} of a {type(module).__name__} is tied to a module outside of this part of the model; enter"
                " subnetworks of the whole model."
            )
        if name in state.weights:
            return Weight(module, name, state, parameter)
        return Vector(module, name, state, parameter, is_product=state.vectors[name])

    @property
    def model(self) -> nn.Module:
        return self._model()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules with a PartitionState; one of them may be the model, which is not kept alive."""
        return [module() for module in self._modules]

    @property
    def aliases(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Each place of a partitioned parameter."""
        return [(module(), name, parameter) for module, name, parameter in self._aliases]

    @property
    def statistics(self) -> list[tuple[nn.Module, PartitionState]]:
        """The modules with statistics for each subnetwork."""
        return [(module(), self.states[i]) for module, i in self._with_statistics]

    def parameters(self) -> list[nn.Parameter]:
        """Return the partitioned parameters of the whole network."""
        return [one.parameter for one in self.exchanged] + [parameter for parameter, _ in self.wholes]

    def is_of(self, modules: list[nn.Module]) -> bool:
        """Return whether this is still the switch of these modules and their parameters."""
        if modules != self.modules or [vars(module)[ATTRIBUTE] for module in modules] != self.states:
            return False
        return all(parameter_of(module(), name) is parameter for module, name, parameter in self._aliases)

    def prepare(self) -> None:
        """Look at everything outside of subnetworks: what has changed there is taken over, or refused."""
        for one in self.weights:
            if not one.is_narrow:
                one.refresh()
        made_of = [one.made for one in self.weights]
        made_of += [(local(one.parameter).data_ptr(), one.rows.data_ptr()) for one in self.vectors]
        if made_of != self._made_of:
            self._check_apart()
            self._made_of = made_of
            for one in self.vectors:
                one.check_shape()
            for one in self.exchanged:
                one.hold()
            self._lists.clear()
            self._factors.clear()
            self._check_of = self._checks()
        for one in self.vectors:
            if not one.is_noted():
                self._agree(one)
        ones, combined, exchange = self._check_of
        exchange(self.count)
        for one, whole in zip(ones, combined, strict=True):
            if not torch.equal(one.whole, whole):
                self._agree(one, is_seen=False)
        self.hook()

    def _checks(self) -> tuple[list[Vector], list[Tensor], Exchange]:
        """Return what compares vectors with their rows, to find writes by `.data`."""
        ones = [one for one in self.vectors if one.whole.device.type in COMPARED and not is_sharded(one.parameter)]
        ones = [one for one in ones if one.rows.dtype == ones[0].rows.dtype and not one.rows.is_meta]
        combined = [torch.empty_like(one.whole) for one in ones]
        rows, are_products = [one.rows for one in ones], [one.is_product for one in ones]
        return ones, combined, Exchange((), (), (), (), combined, rows, are_products)

    def _check_apart(self) -> None:
        """Raise ValueError if parameters share memory, such as tied ones after load_state_dict(assign=True)."""
        own = {id(one.parameter) for one in self.exchanged}
        named = dict(self.model.named_parameters())
        for names in overlapping({name: local(parameter.detach()) for name, parameter in named.items()}):
            if any(id(named[name]) in own for name in names):
                raise ValueError(
                    f"{' and '.join(names)} are two parameters that share memory; tie them by assigning one Parameter"
                    " to both modules, or copy it."
                )

    def hook(self) -> None:
        """Let the gradients of trainable parameters be those of the partition that learns; C outside of subnetworks."""
        for one in self.exchanged:
            parameter = one.parameter
            if one.hook not in (parameter._backward_hooks or ()):
                watch(one, parameter)
        if self._is_guarded:
            return
        self._is_guarded = True
        for module, state in zip(self.modules, self.states, strict=True):
            guard(module, state)
        if state_of(self.model) is None:
            guard_calls(self.model, self.states)

    @torch.no_grad()
    def _agree(self, one: Vector, is_seen: bool = True) -> None:
        """Check that a parameter is what its rows make, where one of them was written into.

        Args:
            is_seen: whether versions tell which one.
        """
        whole, parameter = one.combined(), local(one.parameter)
        before = one.state.versions.get(one.name)
        is_kept = is_seen and before is not None and before[0] == version(one.parameter)  # only the rows have changed
        # A cast, or a file that was cast, rounds the parameter and each of its rows.
        sizes = one.rows.abs().prod(0) if one.is_product else one.rows.abs().sum(0)
        sizes = part(sizes, one.parameter).to(parameter.device)
        is_loaded = before is None or before[1] != version(one.rows)
        eps = torch.finfo(torch.bfloat16 if is_loaded else parameter.dtype).eps
        rounding = max(1e-5, len(one.rows) * eps)
        is_close = (whole - parameter).abs() <= rounding * sizes + 1e-6
        if not is_kept and not (is_close | (whole.isnan() & parameter.isnan())).all():
            raise RuntimeError(
                f"the {one.name} of {type(one.module).__name__} was written into, but is the"
                f" {'product' if one.is_product else 'sum'} of a vector for each partition; write into"
                f" {one.name}_rows [C, ...] instead."
            )
        parameter.copy_(whole)
        one.note()

    @torch.no_grad()
    def move(self, k: int | list[int]) -> None:
        """Turn the model into subnetwork k; or, where modules are to differ, each into its own."""
        wanted = [k] * len(self.states) if isinstance(k, int) else k
        now = {state.active for state in self.states}
        if len(now) == 1 and len(set(wanted)) == 1:
            (old,), new = now, wanted[0]
            if old == new:
                return
            if (old, new) not in self._lists:
                self._lists[old, new] = self._exchanged({id(state): new for state in self.states})
            lists = self._lists[old, new]
        else:
            lists = self._exchanged({id(state): k for state, k in zip(self.states, wanted, strict=True)})
        self.widen()
        for exchange, new in lists[0]:
            exchange(new)
        increment_version(lists[1])
        for reference, i in self._with_statistics:
            module, state, new = reference(), self.states[i], wanted[i]
            for name in state.statistics if state.active != new else ():
                tensor, rows = holder_of(module, name)[name], module._buffers[name + ROWS]
                if tensor is not None:  # torch.func removes them
                    rows[state.active - 1].copy_(tensor)
                    tensor.copy_(rows[new - 1])
        for shard, combined in lists[2]:
            shard.copy_(combined)
        for state, new in zip(self.states, wanted, strict=True):
            state.active = new

    def _exchanged(self, wanted: dict[int, int]) -> tuple:
        """Return what `move` hands to the kernels."""
        # By device, dtype and subnetwork the arguments of Exchange, the last three for vectors.
        found: dict[tuple, tuple[list, ...]] = defaultdict(lambda: tuple([] for _ in range(7)))
        written, shards = [], []
        for one in self.weights:
            if one.is_narrow:
                continue
            old, new = one.state.active, wanted[id(one.state)]
            low, high = sorted((old, new))
            for begin, end in itertools.pairwise(one.starts[low - 1 : high]):
                lists = found[one.memory.device, one.memory.dtype, new][:4]
                learned, defaults = one.learned[begin:end], one.defaults[begin:end]
                values = (defaults, learned) if new < old else (learned, None)
                for each, value in zip(lists, (one.memory, one.places[begin:end], *values), strict=True):
                    each.append(value)
            if low != high and is_sharded(one.parameter):  # the memory of others has their version
                written += [one.parameter, local(one.parameter)]
        for one in self.vectors:
            if one.state.active != (new := wanted[id(one.state)]):
                whole, rows = one.parameter, one.rows
                if is_sharded(whole):
                    whole = torch.empty_like(rows[0])
                    shards.append((local(one.parameter), part(whole, one.parameter)))
                    written.append(one.parameter)
                lists = found[rows.device, rows.dtype, new][4:]
                for each, value in zip(lists, (whole, rows, int(one.is_product)), strict=True):
                    each.append(value)
        return (
            [(Exchange(*lists), new) for (*_, new), lists in found.items()],
            [tensor for tensor in written if not tensor.is_inference()],
            shards,
        )

    def widen(self) -> None:
        """Give modules with nested channels the parameters and attributes of the whole network."""
        for module in self._narrow:
            widen(module())

    def fit(self) -> None:
        """Give modules with nested channels the parameters and attributes of their active subnetwork."""
        self.widen()
        for reference in self._narrow:
            module = reference()
            if (active := state_of(module).active) != self.count:
                narrow_to(module, active)

    def still(self, update: int | None) -> list[nn.Parameter]:
        """Return the parameters that learn, but not where partition `update` does."""
        owned = self.parameters() if update is None else [one for one, owner in self.wholes if owner != update]
        return [parameter for parameter in owned if parameter.requires_grad]

    def followed_statistics(self) -> list[tuple[dict, str, Tensor, Tensor]]:
        """Return held_statistics of modules that may follow batches now, as torch's norms do only in training mode."""
        return held_statistics(one for one, state in self.statistics if one.training or not is_norm(state))

    def resized_statistics(self) -> list[str]:
        """Return which statistics have another shape than in other subnetworks; undo that."""
        found = []
        for module, state in self.statistics:
            for name in state.statistics if not is_norm(state) else ():
                tensor, rows = holder_of(module, name).get(name), module._buffers[name + ROWS]
                if tensor is not None and tensor.shape != rows.shape[1:]:
                    tensor.data = rows[state.active - 1].clone()
                    found.append(f"{name} of {type(module).__name__}")
        return found

    @torch.no_grad()
    def scale_gradients(self, update: int) -> None:
        """Multiply the gradients of scales by the other vectors, where hooks have not: in two launches for all."""
        scales = [one for one in self.vectors if one.name in one.state.unscaled and one.parameter.grad is not None]
        for state in self.states:
            state.unscaled.clear()
        if not scales:
            return
        active = scales[0].state.active
        key = active, update, len(scales)
        if key not in self._factors or any(a is not b for a, b in zip(self._factors[key][0], scales, strict=True)):
            factors = [torch.empty_like(one.rows[0]) for one in scales]
            rows = [one.rows for one in scales]
            self._factors[key] = scales, factors, Exchange((), (), (), (), factors, rows, [True] * len(scales))
        _, factors, exchange = self._factors[key]
        exchange(active, update)
        parts = [part(factor, one.parameter) for factor, one in zip(factors, scales, strict=True)]
        torch._foreach_mul_([local(one.parameter.grad) for one in scales], parts)

    def renew(self) -> None:
        """Let torch refuse the backward pass of what was computed before, where it needs a weight."""
        increment_version([one.parameter for one in self.exchanged if not one.parameter.is_inference()])

    def note(self) -> None:
        """Take the present parameters for those of the active subnetwork, in which nothing else was written."""
        for one in self.exchanged:
            one.note()

    def written(self) -> list[Weight | Vector]:
        """Return what was written into since the last `note`, but by partnets' own optimizers; undo replacements."""
        found = []
        for one in self.exchanged:
            parameter = one.parameter
            is_replaced = not is_sharded(parameter) and parameter.data_ptr() != one.whole.data_ptr()
            if is_replaced:  # such as by parameter.data = ...
                parameter.data = one.whole
            if is_replaced or not one.is_noted():
                found.append(one)
        return found


def version_of(one) -> tuple[int, int]:
    """Return the versions of a parameter and of its vectors; 0 for inference tensors, or if there are no vectors."""
    rows = one.module._buffers.get(one.name + ROWS)
    return version(one.parameter), 0 if rows is None else version(rows)


def noted(parameters) -> None:
    """Take what was written into parameters for right: it was done by one of partnets' own functions."""
    for one in parameters:
        known = one.state.exchanged.get(one.name)
        one.state.versions[one.name] = version_of(one) if known is None else known.version()


def watch(one: Weight | Vector, parameter: nn.Parameter) -> None:
    """Let the gradients of a parameter, or of what was gathered from its shards, be those of the learning partition."""
    if not parameter.requires_grad or (torch.compiler.is_compiling() and id(parameter) in one.hooked):
        return  # torch.compile does not see hooks that are there
    one.hooked.add(id(parameter))
    hooks = parameter._backward_hooks or {}
    before = [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is _masked]
    if before and hooks[before[0]].args[0].state is not None:
        return
    for key in before:  # of a module that is gone
        del hooks[key]
    handle = parameter.register_hook(partial(_masked, one))
    if parameter is one.parameter:
        one.hook = handle.id
    if isinstance(one, Vector):
        parameter.register_post_accumulate_grad_hook(lambda _: _accumulated(one))


def _masked(one: Weight | Vector, grad: Tensor) -> Tensor | None:
    return mask_weight(one, grad) if isinstance(one, Weight) else mask_vector(one, grad)


def mask_weight(one: Weight, grad: Tensor) -> Tensor | None:
    """Return the gradient with zeros outside of the partition that learns."""
    state = one.state
    if state is None or state.count == 1 or state.update == PER_EXAMPLE:
        return None
    if not state.masks and not torch.is_grad_enabled():  # gradients of gradients are of masked ones
        return None
    if state.update is None:
        return torch.zeros_like(grad)
    if (map := one.map_of(grad)) is None:
        return None
    selected = select(local(grad), state.update, state.update, map, state.count, dispatch.requested())
    return sharded_like(selected, grad)


def mask_vector(one: Vector, grad: Tensor) -> Tensor | None:
    """Return the gradient by the vector of the partition that learns; `.grad` is of one partition at a time."""
    state = one.state
    if state is None or state.count == 1 or state.update == PER_EXAMPLE:
        return None
    update = state.update
    if update is None:
        return torch.zeros_like(grad)
    if state.grads or state.grad_of.get(one.name, update) != update:
        turn_gradient(one, update)
    if not one.is_product or state.active == 1:
        return None
    if not state.masks and not torch.is_grad_enabled() and (one.parameter.grad is None or one.name in state.unscaled):
        state.unscaled.add(one.name)  # by `scale_gradients`, with all others
        return None
    rows = one.rows
    factor = torch.cat([rows[: update - 1], rows[update : state.active]]).prod(0)
    return sharded_like(local(grad) * part(factor, grad).to(grad.dtype), grad)


def _accumulated(one: Vector) -> None:
    if one.state is not None and one.state.update not in (None, PER_EXAMPLE):
        note_gradient(one, one.state.update)


def note_gradient(one, k: int) -> None:
    """Note that `.grad` of a vector is the gradient of partition k as it is now."""
    one.state.grad_of[one.name], grad = k, one.parameter.grad
    if grad is not None:  # FSDP moves that of a gathered parameter
        one.state.grad_seen[one.name] = id(grad), version(grad)


def add_gradient(one, k: int, grad: Tensor) -> None:
    """Add to the gradient of a vector of partition k, and make it `.grad`."""
    turn_gradient(one, k)
    parameter = one.parameter
    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
    note_gradient(one, k)


def turn_gradient(one, k: int) -> None:
    """Make a vector's `.grad` the gradient of partition k, and set that of another partition aside."""
    state, parameter = one.state, one.parameter
    forget_cleared(one)
    check_kept(one)
    before = state.grad_of.get(one.name)
    if parameter.grad is not None and before not in (None, k):
        kept = state.grads.setdefault(one.name, {})
        # A copy, as DistributedDataParallel writes the next gradient into the same memory.
        kept[before] = kept[before] + parameter.grad if before in kept else parameter.grad.clone()
        parameter.grad = kept.pop(k, None)
        if parameter.grad is None:
            del state.grad_of[one.name]
        else:
            note_gradient(one, k)


def forget_cleared(one) -> None:
    """Forget what was set aside for other partitions if `.grad` was set to None since, as by model.zero_grad()."""
    if one.parameter.grad is None and one.name in one.state.grad_of:
        one.state.grads.pop(one.name, None)
        del one.state.grad_of[one.name]


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_kept(one) -> None:
    """Raise RuntimeError if gradients were changed, such as by clipping, of which those that wait know nothing.

    If they were set to 0 instead, those that wait are forgotten.
    """
    state, grad = one.state, one.parameter.grad
    if grad is None or not state.grads.get(one.name) or one.name not in state.grad_seen:
        return
    if state.grad_seen[one.name] == (id(grad), version(grad)) or _has_ranks():
        return  # DistributedDataParallel writes into gradients
    if not grad.any():
        state.grads.pop(one.name)
        return
    raise RuntimeError(
        f"the gradient of the {one.name} of a {type(one.module).__name__} was changed while that of partition"
        f" {next(iter(state.grads[one.name]))} waits for its step: take the step of each partition, or unscale and clip"
        " its gradients, before another one learns."
    )


_switches: WeakKeyDictionary[nn.Module, Switch] = WeakKeyDictionary()


def switch_of(model: nn.Module) -> Switch:
    """Return the switch of a model; made once, and again where modules or parameters are others.

    Raises:
        ValueError: see num_partitions.
    """
    modules = partitioned_modules(model)
    found = _switches.get(model)
    if found is None or not found.is_of(modules):
        _switches[model] = found = Switch(model, modules)
    return found
