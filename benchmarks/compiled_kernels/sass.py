"""Machine code of NVIDIA's GPUs as it is disassembled, and the way through a kernel's main loop.

The main loop is the smallest one that multiplies matrices. Through it goes the longest way that one map takes: where
the code branches by the map's bits, the branch for 2; where a part is skipped in the first or the last step, the part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

# Of the map, where a kernel asks as it runs.
BITS = 2
# A register is taken for the map's bits where it is compared with two of these, so near to each other.
_ALL_BITS, _NEAR = (1, 2, 4, 8), 40


@dataclass(frozen=True)
class Instruction:
    """One of a warp's.

    Attributes:
        address: in bytes from the kernel's first.
        guard: the predicate that it runs by, as '@!P0'; empty if it always runs.
        name: with its modifiers, as 'IMAD.WIDE.U32'.
        operands: the results, then what they are made of.
    """

    address: int
    guard: str
    name: str
    operands: tuple[str, ...]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))

    @property
    def opcode(self) -> str:
        return self.modifiers[0]

    @cached_property
    def target(self) -> int | None:
        """Where it jumps: by some calls too, that never return."""
        found = self.opcode in ("BRA", "CALL") and re.search(r"0x([0-9a-f]+)$", self.operands[-1])
        return int(found[1], 16) if found else None

    @property
    def multiply_adds(self) -> float:
        """Of matrices, a warp's share: four warps make an HGMMA's together."""
        shape = re.search(r"^HGMMA\.(\d+)x(\d+)x(\d+)|^HMMA\.(16)(8)(\d+)", self.name)
        if shape is None:
            return 0
        m, n, k = (int(size) for size in shape.groups() if size)
        return m * n * k / (4 if self.opcode == "HGMMA" else 1)

    @property
    def left_registers(self) -> tuple[int, ...]:
        """Of a product, those that hold its left operand; none if it is in shared memory."""
        found = self.multiply_adds and re.match(r"R(\d+)", self.operands[1])
        return tuple(range(int(found[1]), int(found[1]) + 4)) if found else ()


def instructions(listing: str) -> list[Instruction]:
    """A kernel's, as cuobjdump --dump-sass shows them, without what fills the last line of the code."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;"
    found = [
        Instruction(int(address, 16), guard, name, tuple(re.split(r",\s*", operands)))
        for address, guard, name, operands in re.findall(pattern, listing)
    ]
    while found and found[-1].opcode == "NOP":
        found.pop()
    return found


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration, in order, each with how often it runs.

    Attributes:
        steps: the instructions.
        unknown: loops inside of which it is not known how often they run: once is counted.
    """

    steps: Sequence[tuple[Instruction, int]] = field(repr=False)
    unknown: int = 0

    @property
    def multiply_adds(self) -> float:
        """Of matrices, a warp's."""
        return sum(each.multiply_adds * times for each, times in self.steps)

    @property
    def left_entries(self) -> float:
        """How many different entries a warp has in its products' left operands, where those are in registers."""
        written: dict[int, int] = {}
        fragments: dict[tuple, float] = {}
        for i, (each, times) in enumerate(self.steps):
            if each.left_registers:
                key = tuple((register, written.get(register)) for register in each.left_registers)
                fragments[key] = times * 256
            elif found := re.match(r"R(\d+)", each.operands[0]):
                written[int(found[1])] = i
        return sum(fragments.values())


def main_loop(code: Sequence[Instruction]) -> Loop | None:
    """None of a kernel without a loop that multiplies matrices."""
    index = {each.address: i for i, each in enumerate(code)}
    back = [(index[each.target], i) for i, each in enumerate(code) if each.target is not None]
    back = [(head, end) for head, end in back if head <= end]
    for head, end in sorted(back, key=lambda ends: ends[1] - ends[0]):
        multiplies = any(each.multiply_adds for each in code[head : end + 1])
        # Code for waiting lies behind everything else, and a jump from there back is no loop.
        if multiplies and not _is_reached(code, index, end, without=head):
            return _way(code, index, head, end, [each for each in back if each[0] > head and each[1] < end])
    return None


def _followers(code: Sequence[Instruction], index: dict[int, int], i: int) -> list[int]:
    # BRA.DIV and BRA.CONV jump where threads have parted.
    ends = code[i].name.partition(".")[2] not in ("DIV", "CONV") and not code[i].guard
    ends = ends and code[i].opcode in ("BRA", "BRX", "EXIT", "RET")
    following = [] if ends or i + 1 == len(code) else [i + 1]
    return following + ([index[code[i].target]] if code[i].target is not None else [])


def _is_reached(code: Sequence[Instruction], index: dict[int, int], goal: int, without: int) -> bool:
    seen = {0} - {without}
    left = [*seen]
    while left:
        for i in _followers(code, index, left.pop()):
            if i != without and i not in seen:
                seen.add(i)
                left.append(i)
    return goal in seen


def _way(
    code: Sequence[Instruction], index: dict[int, int], head: int, end: int, inner: Sequence[tuple[int, int]]
) -> Loop:
    trips = {(first, last): _trips(code[first : last + 1]) for first, last in inner}
    jumps = _jumps(code[: end + 1])
    times, best, following = {}, {end: 1}, {}
    for i in range(end, head - 1, -1):
        times[i] = 1
        for (first, last), count in trips.items():
            times[i] *= (count or 1) if first <= i <= last else 1
        if i == end:
            continue
        choices = [j for j in _followers(code, index, i) if i < j <= end and j in best]
        if i in jumps and len(choices) == 2:
            choices = [choices[jumps[i]]]
        if choices:
            following[i] = max(choices, key=best.__getitem__)
            best[i] = times[i] + best[following[i]]
    way = [head]
    while way[-1] != end:
        way.append(following[way[-1]])
    unknown = sum(count is None and first in way for (first, _), count in trips.items())
    return Loop([(code[i], times[i]) for i in way], unknown)


def _jumps(code: Sequence[Instruction]) -> dict[int, bool]:
    """Whether the branches jump that only depend on the map's bits."""
    tests = {i: test for i, each in enumerate(code) if (test := _equality(each)) and test[1] in _ALL_BITS}
    known: dict[str, bool] = {}
    jumps = {}
    for i, each in enumerate(code):
        guard = each.guard.strip("@!")
        if each.target is not None and guard in known:
            jumps[i] = known[guard] != ("!" in each.guard)
        if not re.match(r"U?P\d", each.operands[0]):
            continue
        value = None
        if any(
            abs(i - j) < _NEAR and tests[i][0] == register and tests[i][1] != number
            for j, (register, number) in tests.items()
            if i in tests
        ):
            value = (tests[i][1] == BITS) == (each.modifiers[1] == "EQ")
        elif each.name == "PLOP3.LUT":
            value = _combined(each, known)
        known.pop(each.operands[0], None)
        if value is not None and not each.guard:
            known[each.operands[0]] = value
    return jumps


def _equality(each: Instruction) -> tuple[str, int] | None:
    """The register and the number of a test whether they are equal."""
    if not re.match(r"U?ISETP\.(NE|EQ)\.", each.name) or len(each.operands) != 5 or not each.operands[4].endswith("PT"):
        return None
    register, number = each.operands[2].removesuffix(".reuse"), each.operands[3]
    return (register, int(number, 16)) if re.fullmatch(r"0x[0-9a-f]+", number) else None


def _combined(each: Instruction, known: dict[str, bool]) -> bool | None:
    """A predicate made of three others by a table."""
    *inputs, table, _ = each.operands[2:]
    values = [True if name in ("PT", "UPT") else known.get(name) for name in inputs]
    if None in values:
        return None
    return bool(int(table, 16) >> sum(value << i for i, value in enumerate(reversed(values))) & 1)


_ADD = re.compile(r"VIADD|U?IADD3|IMAD\.IADD")
# More are a negative number.
_MOST_TRIPS = 64


def _trips(body: Sequence[Instruction]) -> int | None:
    """How often a loop runs that counts a register from about 0 up to a number; None if that can't be told."""
    wanted, test = body[-1].guard.strip("@!"), None
    for each in reversed(body[:-1]):
        if each.operands[0] == wanted and each.opcode == "PLOP3":
            wanted = next((name for name in each.operands[2:-2] if name not in ("PT", "UPT")), "")
        elif each.operands[0] == wanted:
            test = each
            break
    if test is None or test.opcode not in ("ISETP", "UISETP") or len(test.operands) < 4:
        return None
    register, bound = test.operands[2].removesuffix(".reuse"), test.operands[3]
    additions = {}
    for each in body:
        numbers = [int(name, 16) for name in each.operands[1:] if re.fullmatch(r"0x[0-9a-f]+", name)]
        # By a register it goes on by what can't be told: IMAD.IADD's number is a factor of 1 then.
        registers = [name for name in each.operands[1:] if re.match(r"U?R\d", name)]
        if _ADD.match(each.name) and len(numbers) == len(registers) == 1 and not each.guard:
            sources = {name.removesuffix(".reuse") for name in each.operands[1:]}
            additions[each.operands[0]] = sources, numbers[0]
    # What is compared may be a constant ahead of what is counted.
    ahead = additions.get(register, ({register}, 0))[0]
    counted = next((name for name in (register, *ahead) if name in additions.get(name, ((), 0))[0]), None)
    if counted is None or not re.fullmatch(r"0x[0-9a-f]+", bound):
        return None
    trips = max(1, ceil(int(bound, 16) / additions[counted][1]))
    return trips if trips <= _MOST_TRIPS else None
