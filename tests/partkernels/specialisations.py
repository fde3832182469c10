"""Ahead-of-time compilation of every Triton kernel in the specialisations that its launches can request.

On a GPU, Triton turns an integer argument of 1 into a constant, and compiles separate kernels for multiples of 16, for
64-bit integers, for unaligned pointers and for None. Its interpreter does not specialise.

usage: python specialisations.py {compile,again}, without TRITON_INTERPRET

Prints the failures as JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, product
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from partbench.compiled_kernels import without_gpu
from partbench.compiled_kernels.without_gpu import META, Case, launches
from partbench.peers.layer import Layer
from partkernels.backend import triton as backend
from partkernels.backend.triton import launch

TARGETS = [GPUTarget("cuda", arch, 32) for arch in (90, 80)]
# 1, a multiple of 16, neither, and a 64-bit integer.
INTEGERS = 1, 16, 7, (1 << 31) + 1
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Values of constants that are not flags. Tile sizes do not vary: small tiles compile faster.
CONSTANTS = {
    "BITS": (2, 1, 4, 8),
    "KIND": ("uniform", "zeros", "normal", "stored"),
    "INDEX": (tl.int32, tl.int64),
    "PRECISION": ("tf32", "ieee"),
}
TILE = 64, 64, 4, 2
# Arguments that change from call to call: rows of x, ids, partition numbers, and words of random draws.
CHANGING = {"M", "steps", "count", "partition", "update", "first", "last", "tensors", "place"}
CHANGING |= {"active", "skip", *launch.WORDS}
STEPS = "sgd_steps", "adam_steps"
# Operators that copy entries of a weight.
COPIES = (
    "subnetwork_weight",
    "subnetwork_weight_grad",
    "embedding",
    "gather_entries",
    "scatter_entries",
    "exchange_entries",
)
# Pointers that may be None independently of the others.
OPTIONAL = ("bias",)


def cases() -> Iterator[Case]:
    """Yield calls that together launch every kernel, in each dtype that it supports."""
    for dtype in DTYPES:
        linear = Layer((64, 1024), (64, 1024), dtype=dtype, device=META)
        convolution = Layer((2, 64, 8, 8), (64, 64, 3, 3), padding=1, dtype=dtype, device=META)
        yield Case("linear", linear, tile=TILE)
        yield from (Case(name, linear) for name in COPIES)
        yield from (Case(name, convolution) for name in COPIES[:2])
        yield from (Case(step, linear) for step in STEPS)


def kernels() -> dict[str, JITFunction]:
    """Return every kernel of the backend, by module and name."""
    found = {}
    for module in pkgutil.iter_modules(backend.__path__):
        scope = vars(importlib.import_module(f"{backend.__name__}.{module.name}"))
        found |= {f"{module.name}.{name}": kernel for name, kernel in scope.items() if name.endswith("_kernel")}
    return found


class Specialiser:
    """Triton's specialisation of a kernel for given arguments."""

    def __init__(self, kernel: JITFunction, target: GPUTarget) -> None:
        self.kernel, self.target, self.backend = kernel, target, make_backend(target)
        self._bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)

    def key(self, arguments: dict) -> list:
        """Return the cache key that distinguishes compiled kernels, argument by argument."""
        return self._bind(**arguments)[1]

    def compile(self, arguments: dict) -> None:
        bound, key, options = self._bind(**arguments)
        options, signature, constants, attributes = self.kernel._pack_args(self.backend, options, bound, key, options)
        source = ASTSource(self.kernel, signature, constants, attributes)
        triton.compile(source, target=self.target, options=options.__dict__)


def factors(kernel: JITFunction, examples: Sequence[dict]) -> dict[str, Sequence]:
    """Return the values of each factor that varies between launches: target, example, arguments, pointer alignment."""
    found = {"target": TARGETS, "example": range(len(examples))}
    specialiser, example = Specialiser(kernel, TARGETS[0]), examples[0]
    for parameter in kernel.params:
        name, value = parameter.name, example[parameter.name]
        if name in CONSTANTS:
            found[name] = CONSTANTS[name]
        elif isinstance(value, bool) and name != "ASM":
            found[name] = value, not value
        elif name in OPTIONAL:
            found[name] = 0, 1, None
        elif isinstance(value, torch.Tensor):
            found[name] = 0, 1
        elif isinstance(value, int) and not parameter.is_constexpr:
            kinds = {specialiser.key(example | {name: n})[parameter.num]: n for n in INTEGERS}
            found[name] = tuple(kinds.values())
    return found


def arguments(example: dict, row: dict) -> dict:
    """Return an example's arguments with the changes of a row of factors."""
    made = dict(example)
    for name in row.keys() & example.keys():
        value, level = example[name], row[name]
        if isinstance(value, torch.Tensor) or name in OPTIONAL:
            like = example["x"] if value is None else value
            made[name] = None if level is None else like.new_empty(2)[level:]
        elif value is not None and not isinstance(value, float):
            made[name] = level
    return made


def corners(factors: dict[str, Sequence]) -> Iterator[dict]:
    """Yield rows in which all integers are equal and the other factors cycle through their levels."""
    for turn, integer in enumerate(INTEGERS):
        row = {name: levels[turn % len(levels)] for name, levels in factors.items()}
        yield row | {name: integer for name, levels in factors.items() if levels[-1] == INTEGERS[-1]}


def examples() -> list[tuple[str, JITFunction, list[dict]]]:
    """Return each kernel with its name and the arguments of some launches."""
    found: dict[str, list[dict]] = {name: [] for name in kernels()}
    for one in chain.from_iterable(map(launches, cases())):
        found[one.name].append(one.arguments)
    return [(name, kernel, found[name]) for name, kernel in kernels().items()]


def failures() -> list[str]:
    """Return each kernel's errors with the number of failing rows."""
    found: dict[str, list[dict]] = {}
    for name, kernel, launched in examples():
        for row in corners(factors(kernel, launched)):
            try:
                Specialiser(kernel, row["target"]).compile(arguments(launched[row["example"]], row))
            except Exception as error:
                found.setdefault(f"{name}: {str(error)[-300:]}", []).append(row)
    return [f"{what}\nin {len(rows)} rows, the first of them {rows[0]}" for what, rows in found.items()]


def compiled_again() -> list[str]:
    """Return the changing arguments that cause a recompilation for some of their values."""
    return [
        f"{name}: {argument}"
        for name, kernel, launched in examples()
        for argument in CHANGING & set(kernel.arg_names)
        if len({str(Specialiser(kernel, TARGETS[0]).key(launched[0] | {argument: n})) for n in INTEGERS[:3]}) > 1
    ]


def compiled_again_for_others() -> list[str]:
    """Return the optimizers' kernels that are recompiled for other shapes, maps, addresses or numbers of tensors."""
    keys = defaultdict(set)
    for shape, tensors, address in (((64, 1024), 1, 1 << 40), ((3, 7), 16, (1 << 40) + 2)):
        for step, dtype, bits in product(STEPS, DTYPES, (2, 0)):
            layer = Layer((1, shape[1]), shape, dtype=dtype, device=META)
            with patch.object(without_gpu, "ADDRESS", address):
                for one in launches(Case(step, layer, bits=bits, tensors=tensors)):
                    keys[one.name, dtype].add(str(Specialiser(one.kernel, TARGETS[0]).key(one.arguments)))
    return [f"{name}: {dtype}" for (name, dtype), found in keys.items() if len(found) > 1]


if __name__ == "__main__":
    found = failures() if sys.argv[1] == "compile" else compiled_again() + compiled_again_for_others()
    json.dump(found, sys.stdout)
