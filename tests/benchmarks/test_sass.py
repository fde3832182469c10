"""What is read in machine code, on a few lines of it whose cycles are counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.compiled_kernels import pipes
from benchmarks.compiled_kernels.pipes import ARCHITECTURES
from benchmarks.compiled_kernels.sass import Instruction, Loop, instructions, main_loop

HOPPER, AMPERE = ARCHITECTURES["sm_90"], ARCHITECTURES["sm_80"]
PRODUCT = "HMMA.16816.F32.BF16 R4, R20, R30, R4"
WGMMA = "HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0"


def listing(*lines: str) -> str:
    """As cuobjdump shows it; a line's address is 16 times its number."""
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0123456789abcdef */" for i, line in enumerate(lines))


def code(*lines: str) -> list[Instruction]:
    return instructions(listing(*lines))


def cycles(*lines: str, on=HOPPER) -> dict[str, float]:
    return dict(pipes.cycles(((each, 1) for each in code(*lines)), on))


def names(loop: Loop) -> list[str]:
    return [each.name for each, _ in loop.steps]


def test_an_instruction_is_read_with_its_guard_and_what_fills_the_last_line_is_not():
    first, second = code("@!P0 LOP3.LUT R1, R2.reuse, 0xff, RZ, 0xc0, !PT", "EXIT", "NOP", "NOP")
    assert (first.guard, first.opcode, first.operands[0]) == ("@!P0", "LOP3", "R1")
    assert (second.address, second.name) == (16, "EXIT")


def test_integers_and_bits_take_the_alu_two_cycles_each():
    assert cycles("LOP3.LUT R1, R2, R3, RZ, 0xc0, !PT", "PRMT R4, R1, 0x4140, RZ", "VIADD R5, R4, 0x1") == {
        "issue": 3,
        "ALU": 6,
    }


def test_guarded_instructions_are_issued_like_others():
    assert cycles("@P1 IADD3 R1, R2, R3, RZ") == {"issue": 1, "ALU": 2}


@pytest.mark.parametrize(("on", "both"), [(HOPPER, 1 + 2 + 1 + 1), (AMPERE, 2 + 4 + 2 + 2)])
def test_multiplications_of_integers_take_the_heavy_pipe_and_of_floats_both(on, both):
    lines = "IMAD R1, R2, R3, R4", "IMAD.WIDE.U32 R6, R2, R3, RZ", "FFMA R8, R1, R2, R3", "HFMA2.BF16_V2 R9, R1, R2, R3"
    found = cycles(*lines, on=on)
    assert (found["issue"], found["FMA"]) == (4, both)
    # On Hopper a float's waits in the light one, and a pair takes a cycle of each.
    assert found["IMAD"] == (2 + 4 + 1 if on is HOPPER else both)


def test_conversions_and_uniform_instructions_have_pipes_of_their_own():
    assert cycles("MUFU.RCP R1, R2", "UIADD3 UR4, UR5, 0x1, URZ", "R2UR UR6, R1") == {
        "issue": 3,
        "XU": 8,
        "uniform": 4,
    }


def test_loads_and_stores_take_shared_memory_by_their_bytes():
    found = cycles("LDS R1, [R2]", "LDS.128 R4, [R2]", "STS.64 [R2], R4", "LDSM.16.M88.4 R8, [R2]", "STS.U8 [R2], R1")
    assert found["LSU"] == found["shared"] == 4 + 16 + 8 + 16 + 4


def test_nobody_waits_for_the_bytes_of_an_asynchronous_copy():
    found = cycles("LDGSTS.E.BYPASS.128.ZFILL [R1], desc[UR8][R2.64], P1")
    assert (found["LSU"], found["shared"]) == (4, 16)


def test_an_instruction_on_no_known_pipe_is_told_and_counted_as_the_alus():
    (each,) = code("FROB R1, R2")
    assert not pipes.is_known(each) and pipes.needs(each, HOPPER) == {"issue": 1, "ALU": 2}


def test_products_take_the_tensor_cores_by_their_multiply_adds():
    # A warp's 16x8x16 at 1024 a clock and multiprocessor, and its quarter of 64x256x16 at 2048.
    assert cycles(PRODUCT)["tensor"] == 8
    assert cycles(WGMMA)["tensor"] == 128
    assert cycles("HGMMA.64x256x8.F32.TF32 R24, R152, gdesc[UR4], R24")["tensor"] == 128


def test_wgmma_reads_its_operands_in_shared_memory():
    # 256 rows of 16 entries are 8 KB, 64 clocks of a multiprocessor; 64 rows more are 16 clocks.
    assert cycles(WGMMA)["shared"] == 64
    assert cycles("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0")["shared"] == 80


def test_the_busiest_pipe_bounds_and_the_tensor_cores_are_none():
    total = pipes.cycles(
        ((each, 1) for each in code(WGMMA, "SHF.L.U32 R1, R2, 0x1, RZ", "FFMA R1, R2, R3, R4")), HOPPER
    )
    assert pipes.bound(total) == ("issue", 3)


def test_the_main_loop_is_the_smallest_that_multiplies():
    loop = main_loop(
        code("MOV R1, R2", PRODUCT, "IADD3 R1, R1, 0x1, RZ", "@P0 BRA 0x10", "SHF.L.U32 R1, R2, 0x1, RZ", "@P1 BRA 0x0")
    )
    assert names(loop) == [PRODUCT.split()[0], "IADD3", "BRA"]
    assert loop.multiply_adds == 16 * 8 * 16
    assert main_loop(code("MOV R1, R2", "@P0 BRA 0x0", "EXIT")) is None


def test_code_for_waiting_that_jumps_back_into_the_loop_is_no_loop():
    waits = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R4"
    first = (waits, "@!P0 BRA 0x70", "MOV R1, R2", PRODUCT, "SHF.L.U32 R1, R2, 0x1, RZ", "@P1 BRA 0x0", "EXIT")
    assert names(main_loop(code(*first, waits, "@!P0 BRA 0x70", "BRA 0x20"))) == [
        line.removeprefix("@!P0 ").removeprefix("@P1 ").split()[0] for line in first[:6]
    ]


def test_unrolled_products_tell_how_many_entries_an_iteration_has():
    loop = main_loop(
        code(
            "LOP3.LUT R20, R1, R2, R3, 0xca, !PT",
            PRODUCT,
            "HMMA.16816.F32.BF16 R8, R20.reuse, R32, R8",
            "LOP3.LUT R20, R1, R2, R3, 0xca, !PT",
            PRODUCT,
            "@P0 BRA 0x0",
        )
    )
    # The first two products share a fragment of 16 by 16; then one of its registers is another.
    assert loop.left_entries == 2 * 256
    assert loop.multiply_adds == 3 * 16 * 8 * 16


def test_of_the_branches_by_the_maps_bits_that_of_two_is_taken():
    loop = main_loop(
        code(
            "UISETP.NE.AND UP0, UPT, UR30, 0x1, UPT",
            "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
            "@!P0 BRA 0x90",
            "ISETP.NE.AND P1, PT, R9, 0x7, PT",
            "UISETP.NE.AND UP0, UPT, UR30, 0x2, UPT",
            "PLOP3.LUT P1, PT, PT, PT, UP0, 0x80, 0x0",
            "@!P1 BRA 0xa0",
            "LDS.128 R4, [R2]",
            "BRA 0xb0",
            "LDS.64 R4, [R2]",
            "SHF.L.U32 R1, R2, 0x1, RZ",
            PRODUCT,
            "@P3 BRA 0x0",
        )
    )
    assert [name for name in names(loop) if name.startswith(("LDS", "SHF"))] == ["SHF.L.U32"]


def test_a_part_that_may_be_skipped_is_counted():
    loop = main_loop(code("@P0 BRA 0x20", "SHF.L.U32 R1, R2, 0x1, RZ", PRODUCT, "@P1 BRA 0x0"))
    assert "SHF.L.U32" in names(loop)


@pytest.mark.parametrize(
    ("add", "test", "times", "unknown"),
    [
        ("VIADD R9, R9, 0x10", "R9, 0x40", 4, 0),
        ("VIADD R9, R9, 0x10", "R9, R8", 1, 1),
        ("IMAD.IADD R9, R7, 0x1, R9", "R9, 0x40", 1, 1),
    ],
)
def test_a_loop_inside_counts_as_often_as_it_runs_if_that_can_be_told(add, test, times, unknown):
    lines = PRODUCT, "LDS R1, [R2]", add, f"ISETP.GE.AND P0, PT, {test}, PT", "@!P0 BRA 0x10"
    loop = main_loop(code(*lines, "@P1 BRA 0x0"))
    assert [count for each, count in loop.steps if each.opcode == "LDS"] == [times]
    assert loop.unknown == unknown


REBUILD = ["PRMT R4, R1, 0x4140, RZ"] * 32
WAIT = "WARPGROUP.DEPBAR.LE gsb0, "


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # Two cycles for each of 32, times 8 warps on 4 quarters; a product of 128 cycles for as many warps.
        ([*REBUILD, WGMMA, WAIT + "0x0"], 128 + 256),
        # One under way: the next rebuilding hides behind it.
        ([*REBUILD, WGMMA, WAIT + "0x1"], 256),
    ],
)
def test_a_product_hides_what_is_done_while_it_is_under_way(lines, expected):
    loop = main_loop(code(*lines, "@P0 BRA 0x0"))
    total = pipes.cycles(loop.steps, HOPPER)
    assert pipes.iteration(loop, total, HOPPER, warps=8) == pytest.approx(expected, abs=8)


def test_a_warps_own_products_run_beside_what_the_others_do():
    loop = main_loop(code(*REBUILD, PRODUCT, "@P0 BRA 0x0"))
    assert pipes.iteration(loop, pipes.cycles(loop.steps, HOPPER), HOPPER, warps=8) == 2 * 64
