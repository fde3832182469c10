"""What instructions cost: how long a warp's keep each pipe of its quarter of a multiprocessor busy.

A quarter issues one instruction a cycle. Most pipes take longer to accept one, so a loop takes as long as the busiest
pipe, or as issuing it if that is more. Throughputs are in results a clock of a multiprocessor: 16 are 8 cycles of a
warp in its quarter, 64 are 2, and 128 are 1. For compute capability 8.0 and 9.0 the pipes of floating point are from
https://forums.developer.nvidia.com/t/separate-cuda-core-pipeline-for-fp16-and-fp32/302018; the other figures were
written down without a source at hand. Hold them against "Throughput of Native Arithmetic Instructions" in the CUDA C++
Programming Guide and "Pipelines" in Nsight Compute's Kernel Profiling Guide, or better, against a measurement.

An opcode that no document names is on the pipe of its kind. What none says is taken to be slow: IMAD.WIDE and IMAD.HI,
of 64-bit results, at half the rate of IMAD; uniform instructions at half the rate of issue; every thread's bytes as
different ones, at the 128 a clock of shared memory and the first-level cache, through which go asynchronous copies and
wgmma's operands too. Not counted: conflicts of banks, misses of caches, and what waits for a result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.compiled_kernels.sass import Instruction, Loop

QUARTERS, LANES = 4, 32
# What a multiprocessor does at its best: multiply-adds of 16-bit numbers a clock, by wgmma on 9.0. A warp's mma is
# taken to have half of that there, as on 8.0: no document says.
WGMMA, MMA = 2048, 1024
# Bytes that its shared memory moves in a clock.
SHARED_BYTES = 128


@dataclass(frozen=True)
class Architecture:
    """What differs between the GPUs.

    Attributes:
        float: cycles of a warp's FFMA.
        pair: of its multiply-add of pairs of bfloat16.
        has_light: half of the float units are a pipe of their own, which has no integers.
    """

    float: float
    pair: float
    has_light: bool


ARCHITECTURES = {"sm_80": Architecture(2, 2, False), "sm_90": Architecture(1, 1, True)}

_ALU = """
    BMSK CS2R F2FP FCHK FMNMX FSEL FSET FSETP HMNMX2 HSET2 HSETP2 I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP LOP3 MOV
    MOV32I P2R PLOP3 PRMT PSETP R2P SEL SGXT SHF VABSDIFF VABSDIFF4 VHMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE
"""
_TRANSCENDENTAL = "BREV F2F F2I FLO FRND I2F MUFU POPC S2R"
_HEAVY = "IDP IDP4A IMAD IMUL"
_FLOAT = "FADD FFMA FMUL FSWZADD"
_PAIRS = "HADD2 HFMA2 HMUL2"
_DOUBLE = "DADD DFMA DMNMX DMUL DSETP"
_MEMORY = """
    ATOM ATOMG ATOMS LD LDC LDG LDGSTS LDL LDS LDSM MATCH RED REDUX SHFL ST STAS STG STL STS STSM SYNCS
"""
_UNIFORM = "ELECT R2UR REDUX S2UR UBLKCP UTMALDG UTMAPF UTMASTG VOTEU"
# Whatever these wait for, they are issued once.
_CONTROL = """
    BAR BMOV BRA BREAK BRX BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT FENCE JMP LDGDEPBAR LEPC
    MEMBAR NANOSLEEP NOP RET USETMAXREG WARPGROUP WARPSYNC YIELD
"""
_PIPES = {
    opcode: pipe
    for pipe, opcodes in {
        "ALU": _ALU,
        "XU": _TRANSCENDENTAL,
        "heavy": _HEAVY,
        "float": _FLOAT,
        "pairs": _PAIRS,
        "FP64": _DOUBLE,
        "LSU": _MEMORY,
        "uniform": _UNIFORM,
        "control": _CONTROL,
        "tensor": "HMMA HGMMA",
    }.items()
    for opcode in opcodes.split()
}


def is_known(each: Instruction) -> bool:
    """Whether it is on a pipe that we know of; what isn't is counted as one of the ALU's."""
    return each.opcode in _PIPES or each.opcode.startswith("U")


def needs(each: Instruction, architecture: Architecture) -> dict[str, float]:
    """Cycles of each pipe that a warp's instruction takes, 'issue' being one of them.

    The float units of 9.0 are two pipes of 16 lanes, the heavy of which has the integer multiplications: 'FMA' is both
    of them together.
    """
    pipe = _PIPES.get(each.opcode, "uniform" if each.opcode.startswith("U") else "ALU")
    cycles = {"issue": 1.0}
    if pipe == "heavy":
        wide = 2 if {"WIDE", "HI"} & {*each.modifiers} else 1
        cycles |= {"IMAD": 2.0 * wide, "FMA": (1.0 if architecture.has_light else 2.0) * wide}
    elif pipe in ("float", "pairs"):
        taken = architecture.float if pipe == "float" else architecture.pair
        # Pairs take both pipes at once.
        cycles |= {"FMA": taken} | ({"IMAD": taken} if pipe == "pairs" or not architecture.has_light else {})
    elif pipe == "LSU":
        moved = max(4.0, _bytes_a_lane(each))
        # Nobody waits for an asynchronous copy while its bytes are written.
        cycles |= {"LSU": 4.0 if each.opcode == "LDGSTS" else moved, "shared": moved}
    elif pipe == "tensor":
        cycles |= _product(each)
    elif pipe != "control":
        cycles[pipe] = {"ALU": 2.0, "XU": 8.0, "FP64": 2.0 if architecture.has_light else 4.0, "uniform": 2.0}[pipe]
    return cycles


def _bytes_a_lane(each: Instruction) -> int:
    widths = [int(name) // 8 for name in each.modifiers[1:] if name in ("32", "64", "128")]
    matrices = [int(name) for name in each.modifiers[1:] if each.opcode in ("LDSM", "STSM") and name in ("2", "4")]
    return max([4, *widths, *(4 * count for count in matrices)])


def _product(each: Instruction) -> dict[str, float]:
    """A warp's share of a product; of wgmma, what it reads of its operands in shared memory too."""
    is_wgmma = each.opcode == "HGMMA"
    rate = (WGMMA if is_wgmma else MMA) / QUARTERS / (2 if "TF32" in each.name else 1)
    cycles = {"tensor": each.multiply_adds / rate}
    if is_wgmma:
        m, n, k = (int(size) for size in each.modifiers[1].split("x"))
        rows = n if each.left_registers else n + m
        cycles["shared"] = rows * k * (4 if "TF32" in each.name else 2) / SHARED_BYTES
    return cycles


def cycles(steps: Iterable[tuple[Instruction, int]], architecture: Architecture) -> Counter[str]:
    """The same of many, each so many times."""
    total: Counter[str] = Counter()
    for each, times in steps:
        for pipe, taken in needs(each, architecture).items():
            total[pipe] += times * taken
    return total


def bound(total: Counter[str]) -> tuple[str, float]:
    """The pipe that is busy for longest, and for how long; of those that instructions wait for."""
    waited = ((pipe, taken) for pipe, taken in total.items() if pipe not in ("tensor", "shared"))
    return max(waited, key=lambda item: item[1])


def iteration(loop: Loop, total: Counter[str], architecture: Architecture, warps: int) -> float:
    """Cycles of a multiprocessor that an iteration of a block takes, in which so many warps multiply.

    The warps keep step, as barriers make them. A product that they wait for at once hides nothing; one that is under
    way while they rebuild hides that. A warp's own mma is no such product: others run while it does.

    Args:
        total: what each pipe takes of a warp, at least.
    """
    share = warps / QUARTERS
    least = share * max(total.values())
    if not any(each.opcode == "HGMMA" for each, _ in loop.steps):
        return least
    clock = start = tensor_free = 0.0
    groups: list[float] = []  # of products: when each ends
    for _ in range(4):  # then one iteration is as the one before
        start = clock
        for part in _parts(loop):
            each, times = part[-1]
            rest = part
            if each.opcode == "HGMMA" or _pending(each) is not None:
                rest = part[:-1]
            if rest:
                clock += share * bound(cycles(rest, architecture))[1]
            if each.opcode == "HGMMA":
                tensor_free = max(tensor_free, clock) + times * share * needs(each, architecture)["tensor"]
                if each.operands[-1] == "gsb0":
                    groups.append(tensor_free)
            elif (pending := _pending(each)) is not None:
                clock = max([clock, *groups[: len(groups) - pending]])
    return max(clock - start, least)


def _parts(loop: Loop) -> list[list[tuple[Instruction, int]]]:
    """A loop's instructions, cut after each product and each wait for products."""
    parts: list[list[tuple[Instruction, int]]] = [[]]
    for each, times in loop.steps:
        parts[-1].append((each, times))
        if each.opcode == "HGMMA" or _pending(each) is not None:
            parts.append([])
    return [part for part in parts if part]


def _pending(each: Instruction) -> int | None:
    """How many groups of products may still be under way after it; None if it waits for none."""
    if not each.name.startswith("WARPGROUP.DEPBAR"):
        return None
    return int(re.search(r"0x([0-9a-f]+)", each.operands[-1])[1], 16)
