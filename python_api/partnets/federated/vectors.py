"""Vectors: of a model what travels between clients and server, as one flat vector for each partition."""

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
# Of an object, in the text of a module.
ADDRESS = re.compile("0x[0-9a-f]+")


class Vectors:
    """The entries of each partition w_k, and of ψ, as flat vectors under names: "w1.float32", ..., "hyper.float32".

    Which entry comes where follows from the partitions, which both sides have alike: no index travels. `fingerprint`
    tells whether they do. A model of several dtypes has a vector for each of them.

    Args:
        model: partitioned; or an ordinary one in baselines.Ensemble, all of which is w_1.
        hyper: ψ: a module of partnets.hyper, or several, inside the model; None if none is learned.

    Attributes:
        count: C.
        lengths: of each vector, by its name: the partitions' in their order, ψ's last.
        dtypes: likewise.
        hyper: the parameters of ψ.
        fingerprint: of all that must be alike on both sides: the types of modules and the settings of torch's layers,
            the partitions, their default values, and all of the model that does not travel, as frozen weights. Hex
            digits.

    Raises:
        ValueError: the model has running statistics, which would carry what a later chunk looks like into all
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
        # Of each vector the lengths of its parameters' pieces.
        self._pieces = {name: [*map(len, self._gathered(name, lambda parameter: parameter))] for name in self._parts}
        self.lengths = {name: sum(pieces) for name, pieces in self._pieces.items()}
        self.dtypes = {name: parts[0][0].dtype for name, parts in self._parts.items()}
        self.fingerprint = self._fingerprint()

    def of_partition(self, k: int) -> list[str]:
        """The names of the vectors of partition k."""
        return [name for name in self._parts if name.startswith(f"w{k}.")]

    def of_hyper(self) -> list[str]:
        """The names of the vectors of ψ; empty if none is learned."""
        return [name for name in self._parts if name.startswith(f"{HYPER}.")]

    def from_partition(self, k: int) -> list[str]:
        """The names of the vectors of the partitions k..C: what a client with chunk k may change."""
        return [name for j in range(k, self.count + 1) for name in self.of_partition(j)]

    @torch.no_grad()
    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of these vectors, or of all, on the CPU."""
        return {name: self._joined(name, lambda parameter: parameter) for name in names or self._parts}

    @torch.no_grad()
    def read_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of the model's parameters as such vectors, on the CPU; 0 where there are none."""
        return {name: self._joined(name, _gradient) for name in names}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Sets the model's entries to these vectors, which `check` has found to fit."""
        for name, vector in values.items():
            self._scatter(name, vector, lambda parameter: parameter)

    @torch.no_grad()
    def write_gradients(self, values: Mapping[str, Tensor]) -> None:
        """Makes these vectors the gradients of their entries; those of other entries stay."""
        for name, vector in values.items():
            for parameter, _ in self._parts[name]:
                parameter.grad = _gradient(parameter)
            self._scatter(name, vector, lambda parameter: parameter.grad)

    def check(self, values: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Raises ValueError unless these are vectors of just these names, of the right dtypes and lengths, and finite.

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
        """Raises RuntimeError if parameters of the model have been frozen, or unfrozen, since this was made."""
        if {parameter for parameter in self.model.parameters() if parameter.requires_grad} != self._learning:
            raise RuntimeError(
                "other parameters of the model require a gradient than when this client or server was constructed, and"
                " what travels is of those: freeze first, and construct it anew after any change, on both sides alike."
            )

    def _views(self, name: str, tensor_of) -> Iterable[tuple[Tensor, Partition | None, int]]:
        """Of each parameter in a vector a tensor, and whose entries are meant; None as Partition for all."""
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
            # What modules with parameters say of themselves may have values in it.
            said = "" if [*module.parameters(recurse=False)] else module.extra_repr()
            found.update(f"{path} {type(module).__qualname__} {ADDRESS.sub('', said)} {_settings(module)}".encode())
        for name in sorted(state.keys() - paths):
            if name.rpartition(".")[2] != LEARNED_FROM:
                found.update(name.encode())
                _digest(state[name], found)
        return found.hexdigest()


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a layer of torch's, or one made of it, computes with: its stride, heads or eps."""
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
    elif hasattr(value, "tobytes"):  # NumPy's, whose text leaves out what is in the middle
        found.update(f"{value.dtype} {list(value.shape)}".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        found.update(repr(value).encode())
    else:  # whose text has an address, as of any object
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
            f"{', '.join(found)} would follow each client's own data: running statistics of clients that differ fit"
            " none of them. Normalise by GroupNorm or LayerNorm instead, or leave a pretrained one as it is, with"
            " partnets.partition(..., skip=) and requires_grad_(False)."
        )
    if found := [path or "the model" for path, one in model.named_modules() if one in keepers]:
        raise ValueError(
            f"{', '.join(found)} keeps a state that follows each client's own data and does not travel; leave it out of"
            " the model, or of partnets.partition(..., stateful=)."
        )
