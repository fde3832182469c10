"""A NumPy emulation of the few PTX instructions in our inline assembly, to test it without a GPU."""

from __future__ import annotations

import re

import numpy as np
import torch

Words = np.ndarray  # of uint32


def _number(bits: Words) -> np.ndarray:
    """Convert bfloat16 bits to float64, in which products and sums of two numbers are exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _rounded(values: np.ndarray) -> Words:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().astype(np.uint32) & 0xFFFF


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    sources = [(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)]
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        byte = np.choose(nibble & 7, sources)
        byte = np.where(nibble & 8, (byte >> 7) * 0xFF, byte)
        result |= byte.astype(np.uint32) << (8 * i)
    return result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for i in range(8):
        chosen = [word if i & bit else ~word for word, bit in ((a, 4), (b, 2), (c, 1))]
        result |= np.where((table >> i) & 1, chosen[0] & chosen[1] & chosen[2], 0).astype(np.uint32)
    return result


def _fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    low, high = (_rounded(_number(a >> s) * _number(b >> s) + _number(c >> s)) for s in (0, 16))
    return low | high << 16


INSTRUCTIONS = {
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
    "shl.b32": lambda a, count: a << count,
}


def run(assembly: str, *arguments: Words | int) -> Words:
    """Return the value of $0 after the instructions, given the broadcast arguments $1, $2, ..."""
    words = np.broadcast_arrays(*(np.asarray(argument, dtype=np.uint32) for argument in arguments))
    registers = {f"${i}": word.copy() for i, word in enumerate(words, start=1)}
    for line in re.findall(r"[^;{}]+;", assembly):
        name, _, operands = line.strip(" \n;").partition(" ")
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else np.full_like(words[0], int(s, 0)) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return registers["$0"]
