"""Vectors: the entries of a model that clients and server exchange, as one flat vector for each partition."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from partkernels import gather_entries
from partnets.hyper.hyperparameter import check_direct, find_hyper
from partnets.optim.base import owners
from partnets.subnetworks.state import LEARNED, inside, num_partitions, state_of
from partnets.subnetworks.switch import noted

HYPER = "hyper"
# The address of an object in the text of a module, which differs between processes.
ADDRESS = re.compile("0x[0-9a-f]+")


class Vectors:
    """The entries of each partition w_k and of ψ as named flat vectors: "w1.float32", ..., "hyper.float32".

    The order of entries follows from the partitions, which are the same on both sides, so no indices are sent; compare
    `fingerprint` to verify this. A model of several dtypes has a vector for each dtype.

    Args:
        model: a partitioned model, or a dense one in partnets.Ensemble, which is w_1 as a whole.
        hyper: ψ: one or several modules of partnets.hyper inside the model; None if no ψ is learned.

    Attributes:
        num_partitions: C.
        lengths: the length of each vector by name: the partitions in order, then ψ.
        dtypes: the dtype of each vector by name.
        hyper, hyper_modules: the parameters of ψ; the path and the module of each hyperparameter.
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
        self.model, self.num_partitions = model, num_partitions(model)
        _refuse_statistics(model)
        self.owners = owners(model)
        self.hyper_modules = find_hyper(model, hyper)
        check_direct(self.hyper_modules, "in a federation")
        every = (parameter for module in self.hyper_modules.values() for parameter in module.parameters())
        self.hyper = [*dict.fromkeys(parameter for parameter in every if parameter.requires_grad)]
        partitions = range(1, self.num_partitions + 1)
        pieces = [(one, k, owner.numel(k)) for k in partitions for one, owner in self.owners.items() if owner.numel(k)]
        # The parameters of each vector, each with its partition, or 0 for ψ, and its number of entries there.
        self._parts: dict[str, list[tuple[nn.Parameter, int, int]]] = {}
        for parameter, k, length in [*pieces, *((one, 0, one.numel()) for one in self.hyper)]:
            name = f"{f'w{k}' if k else HYPER}.{kind(parameter.dtype)}"
            self._parts.setdefault(name, []).append((parameter, k, length))
        self._learning = {parameter for parameter in model.parameters() if parameter.requires_grad}
        self.lengths = {name: sum(length for *_, length in parts) for name, parts in self._parts.items()}
        self.dtypes = {name: parts[0][0].dtype for name, parts in self._parts.items()}
        self.fingerprint = self._fingerprint()

    def of_partition(self, k: int) -> list[str]:
        """Return the names of the vectors of partition k."""
        return [name for name in self._parts if name.startswith(f"w{k}.")]

    def sent_by(self, chunk: int) -> tuple[list[str], list[str]]:
        """Return the names of the weight vectors and of ψ's gradient vectors that a client with this chunk sends.

        All subnetworks have seen the first chunk, so its clients send no gradient of ψ, unless the model has one
        partition and ψ is learned on the training loss.
        """
        weights = [name for k in range(chunk, self.num_partitions + 1) for name in self.of_partition(k)]
        hyper = [name for name in self._parts if name.startswith(f"{HYPER}.")]
        return weights, hyper if chunk > 1 or self.num_partitions == 1 else []

    def paths(self) -> set[str]:
        """Return the dotted names of the model's parameters and buffers that have entries of these vectors."""
        tensors = [*self.owners, *(owner.stored for owner in self.owners.values()), *self.hyper]
        found, model = {id(tensor) for tensor in tensors}, self.model
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return {path for path, tensor in named if id(tensor) in found}

    @torch.no_grad()
    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return copies of these vectors, or of all, on the CPU.

        Raises:
            RuntimeError: the model is inside of partnets.subnetwork.
        """
        self._check_outside()
        return {name: self._joined(name, self._values) for name in (self._parts if names is None else names)}

    @torch.no_grad()
    def read_gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the parameters' gradients as vectors with these names, on the CPU; 0 for parameters without one."""
        return {name: self._joined(name, self._gradient) for name in names}

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set the model's entries to these vectors, after `check` has accepted them.

        Raises:
            RuntimeError: the model is inside of partnets.subnetwork; nothing has changed.
        """
        self._check_outside()
        changed = set()
        for name, vector in values.items():
            for parameter, k, piece in self._split(name, vector):
                if not k:
                    parameter.copy_(piece.view_as(parameter))
                    continue
                owner = self.owners[parameter]
                owner.put(owner.stored, k, piece)
                changed.add(owner)
        for owner in changed:
            owner.combine()
        noted(changed)

    @torch.no_grad()
    def write_gradients(self, values: Mapping[str, Tensor]) -> None:
        """Set the gradients of these vectors' entries; the gradients of other entries are left unchanged."""
        for name, vector in values.items():
            for parameter, k, piece in self._split(name, vector):
                if k:
                    self.owners[parameter].put_gradient(k, piece)
                else:
                    parameter.grad = piece.view_as(parameter).clone()

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

    def _check_outside(self) -> None:
        if inside(self.model):
            raise RuntimeError(
                "the model is inside of partnets.subnetwork, where its parameters are those of one subnetwork; read and"
                " write its vectors outside."
            )

    def _values(self, parameter: nn.Parameter, k: int) -> Tensor:
        """Return the entries of a parameter that partition k owns, packed; all entries if k is 0."""
        return self.owners[parameter].take(self.owners[parameter].stored, k) if k else parameter.reshape(-1)

    def _gradient(self, parameter: nn.Parameter, k: int) -> Tensor:
        """Return the gradient of the entries that `_values` returns, packed."""
        grad = self.owners[parameter].gradient(k) if k else parameter.grad
        if grad is None:
            return torch.zeros_like(self._values(parameter, k))
        partition = self.owners[parameter].partition if k else None
        return grad.reshape(-1) if partition is None else gather_entries(grad, partition, k)

    def _joined(self, name: str, entries: Callable[[nn.Parameter, int], Tensor]) -> Tensor:
        return torch.cat([entries(parameter, k) for parameter, k, _ in self._parts[name]]).cpu()

    def _split(self, name: str, vector: Tensor) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield each parameter of a vector, its partition (0 for ψ), and the packed piece on its device."""
        pieces = vector.split([length for *_, length in self._parts[name]])
        for (parameter, k, _), piece in zip(self._parts[name], pieces, strict=True):
            yield parameter, k, piece.to(parameter.device)

    def _fingerprint(self) -> str:
        found = hashlib.blake2b(repr([self.num_partitions, self.lengths]).encode(), digest_size=16)
        for path, module in self.model.named_modules():
            # extra_repr of modules with parameters may contain their values.
            said = "" if [*module.parameters(recurse=False)] else module.extra_repr()
            partitioned = state_of(module)
            vectors = None if partitioned is None else partitioned.vectors
            found.update(_text([path, type(module).__qualname__, said, _settings(module), vectors]))
        state = self.model.state_dict() | dict(self.model.named_buffers())
        for name in sorted(state.keys() - self.paths()):
            if name.rpartition(".")[2] == LEARNED:
                continue
            value = state[name]
            found.update(name.encode())
            if isinstance(value, Tensor):
                found.update(f"{value.dtype} {list(value.shape)}".encode())
                found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            else:
                found.update(_text(value))
        return found.hexdigest()


def norm(vectors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all vectors, concatenated.

    Example:
        >>> norm({"w1.float32": torch.tensor([3.0]), "w2.float32": torch.tensor([4.0])})
        5.0
    """
    return math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors.values()))


def _text(value: Any) -> bytes:
    return ADDRESS.sub("", repr(value)).encode()


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a layer of torch or partnets that affect its result, such as stride, heads or eps."""
    if type(module).__module__.partition(".")[0] not in ("torch", "partnets"):
        return {}
    plain = bool | int | float | str | None
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if not (name.startswith("_") or name == "training")
        and all(isinstance(part, plain) for part in (value if isinstance(value, tuple) else (value,)))
    }


def kind(dtype: torch.dtype) -> str:
    """Return a dtype's name in vectors' names and messages."""
    return str(dtype).removeprefix("torch.")


def _refuse_statistics(model: nn.Module) -> None:
    owned = {path or "the model": module for path, module in model.named_modules() if state_of(module) is not None}
    norms = {path: one for path, one in owned.items() if isinstance(one, _NormBase) and one.running_mean is not None}
    if norms:
        found = ", ".join(f"{path} ({type(one).__name__})" for path, one in norms.items())
        raise ValueError(
            f"{found} has running statistics, which would differ between clients and are not sent."
            " Normalise by GroupNorm or LayerNorm instead, or keep a pretrained one fixed with"
            " partnets.partition(..., skip=) and requires_grad_(False)."
        )
    keepers = [path for path, one in owned.items() if state_of(one).statistics]
    if keepers:
        raise ValueError(
            f"{', '.join(keepers)} has per-subnetwork buffers, which follow each client's data and are not sent; leave"
            " it out of the model, or of partnets.partition(..., stateful=)."
        )
