"""Switch: makes a model one of its subnetworks by exchanging the entries that differ, in place."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from partkernels.operators.entries import Exchange
from partnets.hyper import Hyperparameter
from partnets.subnetworks.channels import narrow_to, widen
from partnets.subnetworks.exchanged import Layout, Vector, Weight, version_of
from partnets.subnetworks.gradients import note_scaled, watch
from partnets.subnetworks.guard import guard, guard_calls
from partnets.subnetworks.state import (
    ATTRIBUTE,
    ROWS,
    PartitionState,
    agreed_num_partitions,
    held_statistics,
    holder_of,
    is_norm,
    parameter_of,
    partitioned_modules,
    state_of,
)
from partnets.utils.modules import is_sharded, overlapping
from partnets.utils.shards import local, part, version

# The devices on which vectors are compared with their rows at each entry; a GPU would have to be waited for.
COMPARED = ("cpu",)
CONVERT = "convert or replace modules before partnets.partition, or in the model that partnets.merge returns"


class Switch:
    """The entries that differ between the subnetworks of a model, and their exchange.

    Args:
        model: the model.
        modules: its modules with a PartitionState.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        self._model, self._modules = weakref.ref(model), [weakref.ref(module) for module in modules]
        self._kinds = {path: type(one).__name__ for path, one in model.named_modules() if state_of(one) is not None}
        self.states = [state_of(module) for module in modules]
        self._ids = {id(state) for state in self.states}
        found: dict[int, Weight | Vector] = {}
        self._aliases: list[tuple[weakref.ref, str]] = []
        self._held: list[tuple[PartitionState, dict, str]] = []
        self._parameters: list[nn.Parameter] = []
        self.wholes: list[tuple[nn.Parameter, int]] = []
        for module, state in zip(modules, self.states, strict=True):
            if added := [name for name in state.lacking if module._parameters.get(name) is not None]:
                raise RuntimeError(
                    f"this {type(module).__name__} was partitioned without {added[0]}, which would be the same in all"
                    f" subnetworks; {CONVERT}."
                )
            for name, owner in state.wholes.items():
                self.wholes.append((parameter_of(module, name), owner))
            for name in (*state.weights, *state.vectors):
                parameter = parameter_of(module, name)
                self._aliases.append((weakref.ref(module), name))
                self._held.append((state, module._parameters, name))
                self._parameters.append(parameter)
                if id(parameter) not in found:
                    found[id(parameter)] = self._exchanged_of(module, name, parameter)
                state.exchanged[name] = found[id(parameter)]
        self.weights = [one for one in found.values() if isinstance(one, Weight)]
        self.vectors = [one for one in found.values() if isinstance(one, Vector)]
        self.exchanged = [*self.weights, *self.vectors]
        self.num_partitions = agreed_num_partitions(model, self.states)
        of_state = list(zip(self._modules, self.states, range(len(modules)), strict=True))
        self._with_statistics = [(module, i) for module, state, i in of_state if state.statistics]
        self._narrow = [module for module, state, _ in of_state if state.narrow is not None]
        self._is_guarded = False
        # Whether the model stays in a subnetwork that is left, until the next one is entered.
        self.is_resident = False
        self._lists: dict[tuple[int, int], tuple] = {}
        self._layout: Layout | None = None
        self._factors: dict[tuple, tuple] = {}
        self._check_of: tuple[list[Vector], list[Tensor], Exchange] = [], [], Exchange()

    def _exchanged_of(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Weight | Vector:
        """Return the Weight or Vector of a parameter: that of another model with this module, if there is one."""
        state = state_of(module)
        known = state.exchanged.get(name)
        if known is not None and known.parameter is parameter and id(known.state) in self._ids:
            return known
        if known is not None and is_sharded(known.parameter) and not is_sharded(parameter):
            raise RuntimeError(
                f"the {name} of a {type(module).__name__} is still gathered from its shards; call reshard() of the"
                " modules that torch has sharded first."
            )
        if known is not None and known.parameter is parameter and known.state is not None:
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
        places = zip(self._aliases, self._parameters, strict=True)
        return [(module(), name, parameter) for (module, name), parameter in places]

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
        now = [state.base.get(name, held.get(name)) for state, held, name in self._held]  # as parameter_of, but faster
        return not any(map(operator.is_not, now, self._parameters))

    def refuse_replacements(self) -> None:
        """Raise RuntimeError if modules without partitions are where partitioned ones were."""
        now = dict(self.model.named_modules())
        for path, kind in self._kinds.items():
            if (new := now.get(path)) is None or isinstance(new, Hyperparameter) or partitioned_modules(new):
                continue
            if next(itertools.chain(new.parameters(), new.buffers()), None) is not None:
                raise RuntimeError(
                    f"{path} was a partitioned {kind}, and the {type(new).__name__} in its place would be the same in"
                    f" all subnetworks; {CONVERT}."
                )

    def prepare(self) -> None:
        """Take over changes that were made outside of subnetworks, or refuse them."""
        self.check_statistics()
        if self._layout is None or not self._layout.is_current():
            for one in self.weights:
                if not one.is_narrow:
                    one.refresh()
            self._check_apart()
            for one in self.vectors:
                one.check_shape()
            for one in self.exchanged:
                one.hold()
            self._lists.clear()
            self._factors.clear()
            self._check_of = self._checks()
            self._layout = Layout(self.exchanged)
        for one in self.vectors:
            if not one.is_unchanged():
                self._agree(one)
        ones, combined, exchange = self._check_of
        exchange(self.num_partitions)
        for one, whole in zip(ones, combined, strict=True):
            if not torch.equal(one.whole, whole):
                self._agree(one, is_seen=False)
        self.hook()

    def _checks(self) -> tuple[list[Vector], list[Tensor], Exchange]:
        """Return the arguments of a comparison of vectors with their rows, which finds writes by `.data`."""
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
        """Check that a parameter equals its combined rows after one of the two was written into.

        Args:
            is_seen: whether their versions show which one.
        """
        whole, parameter = one.combined(), local(one.parameter)
        before = one.state.versions.get(one.name)
        is_kept = is_seen and before is not None and before[0] == version(one.parameter)  # only the rows have changed
        # A cast, or a file that was cast, rounds the parameter and each of its rows.
        sizes = one.rows.abs().prod(0) if one.is_product else one.rows.abs().sum(0)
        sizes = part(sizes, one.parameter).to(parameter.device)
        is_loaded = before is None or before[1:] != version_of(one)[1:]
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
                if tensor is not None:  # torch.func removes those of norms
                    rows[state.active - 1].copy_(tensor)
                    tensor.copy_(rows[new - 1])
        for shard, combined in lists[2]:
            shard.copy_(combined)
        for state, new in zip(self.states, wanted, strict=True):
            state.active = new

    def _exchanged(self, wanted: dict[int, int]) -> tuple:
        """Return the arguments of the kernels in `move`."""
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
        for reference in self._narrow:
            module = reference()
            widen(module, state_of(module).active)

    def fit(self) -> None:
        """Give modules with nested channels the parameters and attributes of their active subnetwork."""
        self.widen()
        for reference in self._narrow:
            module = reference()
            if (active := state_of(module).active) != self.num_partitions:
                narrow_to(module, active)

    def still(self, update: int | None) -> list[nn.Parameter]:
        """Return the parameters that learn, but not where partition `update` does."""
        owned = self.parameters() if update is None else [one for one, owner in self.wholes if owner != update]
        return [parameter for parameter in owned if parameter.requires_grad]

    def followed_statistics(self) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
        """Return held_statistics of modules that may follow batches now, as torch's norms do only in training mode."""
        return held_statistics(one for one, state in self.statistics if one.training or not _is_torchs_norm(one, state))

    def check_statistics(self) -> None:
        """Raise RuntimeError, and undo it, if statistics have another shape or dtype than in other subnetworks.

        Statistics that the module's code has assigned get their own memory.
        """
        found, memory = [], set()
        for module, state in self.statistics:
            for name in state.statistics if not is_norm(state) else ():
                own, rows = holder_of(module, name), module._buffers[name + ROWS]
                tensor = own.get(name)
                if tensor is None:
                    module._buffers[name] = rows[state.active - 1].clone()
                elif (tensor.shape, tensor.dtype) != (rows.shape[1:], rows.dtype):
                    tensor.data = rows[state.active - 1].clone()
                else:
                    address = tensor.untyped_storage().data_ptr()
                    if tensor.numel() and (address in memory or 0 in tensor.stride()):
                        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
                        if isinstance(tensor, nn.Parameter):
                            tensor.data = copy
                        else:
                            own[name] = copy
                    memory.add(address)
                    continue
                found.append(f"{name} of {type(module).__name__}")
        if found:
            raise RuntimeError(
                f"{found[0]} has changed its shape or dtype, or was removed; let it keep one, such as the shape of its"
                " largest content."
            )

    @torch.no_grad()
    def scale_gradients(self, scales: list[Vector], active: int, update: int) -> None:
        """Multiply the gradients of scales by the vectors of other partitions, in two launches for all."""
        by = active, update
        scales = [
            one for one in scales if one.state.unscaled.pop(one.name, None) == by and one.parameter.grad is not None
        ]
        if not scales:
            return
        if by not in self._factors or self._factors[by][0] != scales:
            factors = [torch.empty_like(one.rows[0]) for one in scales]
            rows = [one.rows for one in scales]
            self._factors[by] = scales, factors, Exchange((), (), (), (), factors, rows, [True] * len(scales))
        _, factors, exchange = self._factors[by]
        exchange(active, update)
        parts = [part(factor, one.parameter) for factor, one in zip(factors, scales, strict=True)]
        torch._foreach_mul_([local(one.parameter.grad) for one in scales], parts)
        note_scaled(scales, update)

    def renew(self) -> None:
        """Let torch refuse later backward passes of earlier outputs that need a weight."""
        plain = [one.watched[0] for one in self.exchanged if one.watched is not None]  # with the parameter's version
        others = [one.parameter for one in self.exchanged if one.watched is None]
        increment_version([*plain, *(parameter for parameter in others if not parameter.is_inference())])

    def note(self) -> None:
        """Call `note` for all parameters, after a function of partnets has written into them."""
        for one in self.exchanged:
            one.note()

    def written(self) -> list[Weight | Vector]:
        """Return parameters written into since `note`, other than by partnets' optimizers; undo replacements."""
        found = []
        for one in self.exchanged:
            parameter = one.parameter
            if one.watched is not None and parameter.data_ptr() == one.watched[0].data_ptr() and one.is_unchanged():
                continue
            is_replaced = not is_sharded(parameter) and parameter.data_ptr() != one.whole.data_ptr()
            if is_replaced:  # such as by parameter.data = ...
                parameter.data = one.whole
            if is_replaced or not one.is_unchanged():
                found.append(one)
        return found


def _is_torchs_norm(module: nn.Module, state: PartitionState) -> bool:
    """Return whether a module updates its statistics only in training mode, as torch's norms do."""
    return is_norm(state) and type(module).__module__.partition(".")[0] == "torch"


def noted(parameters: Iterable[Any]) -> None:
    """Remember the versions of parameters after a function of partnets has written into them; see is_unchanged."""
    for one in parameters:
        known = one.state.exchanged.get(one.name)
        one.state.versions[one.name] = version_of(one) if known is None else known.version()


_switches: WeakKeyDictionary[nn.Module, Switch] = WeakKeyDictionary()


def partitioned_elsewhere() -> set[int]:
    """Return the ids of the parameters of all partitioned models."""
    places = [(module, p) for switch in _switches.values() for module, _, p in switch.aliases if module is not None]
    return {id(parameter) for module, parameter in places if state_of(module) is not None}


def switch_of(model: nn.Module, modules: list[nn.Module] | None = None) -> Switch:
    """Return the switch of a model; made once, and again where modules or parameters are others.

    Args:
        model: the model.
        modules: modules_of(model), if they are known.

    Raises:
        ValueError: see num_partitions.
    """
    partitioned = partitioned_modules(model, modules)
    found = _switches.get(model)
    if found is None or not found.is_of(partitioned):
        if found is not None:
            found.refuse_replacements()
        _switches[model] = found = Switch(model, partitioned)
    return found
