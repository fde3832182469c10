"""Vectors: the entries of a model that clients and server exchange, as one flat vector for each partition."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import Partition
from partnets.hyper.hyperparameter import check_direct, find_hyper
from partnets.nn.batch_norm import running_norms
from partnets.nn.entries import put, take
from partnets.nn.layer import LEARNED_FROM
from partnets.nn.own_state import OwnState
from partnets.nn.partitioned import count, partitioned_layers
from partnets.optim.base import owners

HYPER = "hyper"
# The address of an object in the text of a module, which differs between processes.
ADDRESS = re.compile("0x[0-9a-f]+")


class Vectors:
    """The entries of each partition w_k and of ψ as named flat vectors: "w1.float32", ..., "hyper.float32".

    The order of entries follows from the partitions, which are the same on both sides, so no indices are sent; compare
    `fingerprint` to verify this. A model of several dtypes has a vector for each dtype.

    Args:
        model: a partitioned model, or a dense one in baselines.Ensemble, which is w_1 as a whole.
        hyper: ψ: one or several modules of partnets.hyper inside the model; None if no ψ is learned.

    Attributes:
        count: C.
        lengths: the length of each vector by name: the partitions in order, then ψ.
        dtypes: the dtype of each vector by name.
        hyper: the parameters of ψ.
        fingerprint: hex digits of a hash of everything that must agree on both sides: the types of modules and the
            settings of torch's layers, the partitions, their default values, and all state that is not sent, such as
            frozen weights.

    Raises:
        ValueError: the model has running statistics, which would carry information on later chunks into all
            subnetworks, or a trainable parameter that no partition owns.

    Example:
        >>> import partnets
        >>> vectors = Vectors(partnets.partition(nn.Linear(4, 3), (0.5, 0.5)))
        >>> vectors.lengths
        {'w1.float32': 9, 'w2.float32': 9}
        >>> vectors.read(vectors.of_partition(2))["w2.float32"].shape
        torch.Size([9])
    """

    def __init__(self, model: nn.Module, hyper: nn.Module | Iterable[nn.Module] | None = None) -> None:
        self.model, self.count = model, count(model)
        _refuse_statistics(model)
        self.owners = owners(model)
        check_direct(found := find_hyper(model, hyper), "in a federation")
        modules = found.values()
        self.hyper = [*dict.fromkeys(one for module in modules for one in module.parameters() if one.requires_grad)]
        self._parts: dict[str, list[tuple[nn.Parameter, int]]] = {}
        for k in range(1, self.count + 1):
            for parameter, (layer, name) in self.owners.items():
                if layer.entries(name, [parameter], k) is not None:
                    self._parts.setdefault(f"w{k}.{_kind(parameter)}", []).append((parameter, k))
        for parameter in self.hyper:
            self._parts.setdefault(f"{HYPER}.{_kind(parameter)}", []).append((parameter, 0))
        self._learning = {parameter for parameter in model.parameters() if parameter.requires_grad}
        # For each vector, the lengths of its parameters' pieces.
        self._pieces = {name: [*map(len, self._gathered(name, lambda parameter: parameter))] for name in self._parts}
        self.lengths = {name: sum(pieces) for name, pieces in self._pieces.items()}
        self.dtypes = {name: parts[0][0].dtype for name, parts in self._parts.items()}
        self.fingerprint = self._fingerprint()

    def of_partition(self, k: int) -> list[str]:
        """Return the names of the vectors of partition k."""
        return [name for name in self._parts if name.startswith(f"w{k}.")]

    def of_hyper(self) -> list[str]:
        """Return the names of the vectors of ψ; empty if no ψ is learned."""
        return [name for name in self._parts if name.startswith(f"{HYPER}.")]

    def from_partition(self, k: int) -> list[str]:
        """Return the names of the vectors of partitions k..C, which a client with chunk k may change."""
        return [name for j in range(k, self.count + 1) for name in self.of_partition(j)]

    @torch.no_grad()
    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return copies of these vectors, or of all, on the CPU."""
        return {name: self._joined(name, lambda parameter: parameter) for name in names or self._parts}

    @torch.no_grad()
    def read_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the parameters' gradients as vectors with these names, on the CPU; 0 for parameters without one."""
        return {name: self._joined(name, _gradient) for name in names}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set the model's entries to these vectors, after `check` has accepted them."""
        for name, vector in values.items():
            self._scatter(name, vector, lambda parameter: parameter)

    @torch.no_grad()
    def write_gradients(self, values: Mapping[str, Tensor]) -> None:
        """Set the gradients of these vectors' entries; the gradients of other entries are left unchanged."""
        for name, vector in values.items():
            for parameter, _ in self._parts[name]:
                parameter.grad = _gradient(parameter)
            self._scatter(name, vector, lambda parameter: parameter.grad)

    def check(self, values: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Raise ValueError unless values has exactly these names, with finite vectors of the right dtypes and lengths.

        Example:
            >>> import partnets
            >>> vectors = Vectors(partnets.partition(nn.Linear(4, 3), (0.5, 0.5)))
            >>> vectors.check({"w2.float32": torch.full((9,), torch.nan)}, vectors.of_partition(2))
            Traceback (most recent call last):
            ValueError: w2.float32 has NaN or infinite numbers.
        """
        names = list(names)
        if values.keys() != {*names}:
            raise ValueError(f"the vectors are {sorted(values)}, but must be {names}.")
        for name, vector in values.items():
            expected = f"a tensor of {self.dtypes[name]} and length {self.lengths[name]}"
            if not isinstance(vector, Tensor):
                raise ValueError(f"{name} is a {type(vector).__name__}, but must be {expected}.")
            if vector.dtype != self.dtypes[name] or vector.shape != (self.lengths[name],):
                raise ValueError(f"{name} is {list(vector.shape)} of {vector.dtype}, but must be {expected}.")
            if not vector.isfinite().all():
                raise ValueError(f"{name} has NaN or infinite numbers.")

    def check_learning(self) -> None:
        """Raise RuntimeError if parameters of the model were frozen or unfrozen since construction."""
        if {parameter for parameter in self.model.parameters() if parameter.requires_grad} != self._learning:
            raise RuntimeError(
                "parameters of the model were frozen or unfrozen after this client or server was constructed, so its"
                " vectors no longer fit; freeze first, and after a change construct client and server again."
            )

    def _views(self, name: str, tensor_of) -> Iterable[tuple[Tensor, Partition | None, int]]:
        """Yield, for each parameter of a vector, its tensor, its Partition (None: all entries) and k."""
        for parameter, k in self._parts[name]:
            tensor = tensor_of(parameter).detach()
            if not k:
                yield tensor, None, 0
                continue
            layer, own = self.owners[parameter]
            (view,), partition = layer.entries(own, [tensor], k)
            yield view, partition, k

    @torch.no_grad()
    def _gathered(self, name: str, tensor_of) -> list[Tensor]:
        return [take(view, partition, k) for view, partition, k in self._views(name, tensor_of)]

    def _joined(self, name: str, tensor_of) -> Tensor:
        return torch.cat(self._gathered(name, tensor_of)).cpu()

    def _scatter(self, name: str, vector: Tensor, tensor_of) -> None:
        pieces = vector.split(self._pieces[name])
        for (view, partition, k), piece in zip(self._views(name, tensor_of), pieces, strict=True):
            put(view, partition, k, piece.to(view.device))

    def _fingerprint(self) -> str:
        travelling = {*self.owners, *self.hyper}
        paths = {path for path, parameter in self.model.named_parameters() if parameter in travelling}
        state = self.model.state_dict() | dict(self.model.named_buffers())
        found = hashlib.blake2b(repr([self.count, self.lengths]).encode(), digest_size=16)
        for path, module in self.model.named_modules():
            # extra_repr of modules with parameters may contain their values.
            said = "" if [*module.parameters(recurse=False)] else module.extra_repr()
            found.update(f"{path} {type(module).__qualname__} {ADDRESS.sub('', said)} {_settings(module)}".encode())
        for name in sorted(state.keys() - paths):
            if name.rpartition(".")[2] != LEARNED_FROM:
                found.update(name.encode())
                _digest(state[name], found)
        return found.hexdigest()


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a layer of torch or partnets that affect its result, such as stride, heads or eps."""
    if type(module).__module__.partition(".")[0] not in ("torch", "partnets"):
        return {}
    plain, others = bool | int | float | str | None, ("training", LEARNED_FROM)
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if not (name.startswith("_") or name in others)
        and all(isinstance(part, plain) for part in (value if isinstance(value, tuple) else (value,)))
    }


def _digest(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            found.update(str(name).encode())
            _digest(value[name], found)
    elif isinstance(value, list | tuple):
        for part in value:
            _digest(part, found)
    elif hasattr(value, "tobytes"):  # repr of a NumPy array omits the middle of long arrays
        found.update(f"{value.dtype} {list(value.shape)}".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        found.update(repr(value).encode())
    else:  # repr of other objects contains an address
        found.update(type(value).__qualname__.encode())


def _kind(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _refuse_statistics(model: nn.Module) -> None:
    norms = {module for module in running_norms(model)[0] if module.running_mean is not None}
    keepers = {layer for _, layer in partitioned_layers(model) if isinstance(layer, OwnState)}
    found = [f"{path or 'the model'} ({type(one).__name__})" for path, one in model.named_modules() if one in norms]
    if found:
        raise ValueError(
            f"{', '.join(found)} has running statistics, which would differ between clients and are not sent."
            " Normalise by GroupNorm or LayerNorm instead, or keep a pretrained one fixed with"
            " partnets.partition(..., skip=) and requires_grad_(False)."
        )
    if found := [path or "the model" for path, one in model.named_modules() if one in keepers]:
        raise ValueError(
            f"{', '.join(found)} has per-subnetwork buffers, which follow each client's data and are not sent; leave it"
            " out of the model, or of partnets.partition(..., stateful=)."
        )
