"""Tests of reading machine code, on a few lines of it."""

from __future__ import annotations

from partbench.compiled_kernels.code import amdgcn, costs, left_entries, main_loop, multiply_adds, sass

PRODUCT = "HMMA.16816.F32.BF16 R4, R20, R30, R4"
WGMMA = "HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0"


def code(*lines: str):
    """Parse lines as cuobjdump shows them; a line's address is 16 times its number."""
    return sass(
        "\n".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0123456789abcdef */" for i, line in enumerate(lines))
    )


def names(loop) -> list[str]:
    return [each.name for each in loop]


def test_instructions_are_read_without_guards_and_padding_nops_are_dropped():
    first, second = code("@!P0 LOP3.LUT R1, R2.reuse, 0xff, RZ, 0xc0, !PT", "EXIT", "NOP", "NOP")
    assert (first.name, first.operands[0], second.name) == ("LOP3.LUT", "R1", "EXIT")


def test_products_are_counted_by_their_multiply_adds():
    # A warp's 16x8x16, its quarter of 64x256x16, and AMD's 32x32x8.
    assert multiply_adds(code(PRODUCT)) == 16 * 8 * 16
    assert multiply_adds(code(WGMMA)) == 64 * 256 * 16 / 4
    assert multiply_adds(amdgcn("\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]")) == 32 * 32 * 8


def test_the_main_loop_is_the_smallest_that_multiplies():
    loop = main_loop(
        code("MOV R1, R2", PRODUCT, "IADD3 R1, R1, 0x1, RZ", "@P0 BRA 0x10", "SHF.L.U32 R1, R2, 0x1, RZ", "@P1 BRA 0x0")
    )
    assert names(loop) == [PRODUCT.split()[0], "IADD3", "BRA"]
    assert main_loop(code("MOV R1, R2", "@P0 BRA 0x0", "EXIT")) is None


def test_entries_of_an_iteration_are_counted_from_unrolled_products():
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
    # The first two products share a fragment of 16 by 16; then one of its registers is written.
    assert left_entries(loop) == 2 * 256
    assert multiply_adds(loop) == 3 * 16 * 8 * 16


def test_slots_are_instructions_of_the_loop_for_each_entry():
    loop = code("MOV R1, R2", "LOP3.LUT R20, R1, R2, R3, 0xca, !PT", PRODUCT, "@P0 BRA 0x10", "EXIT")
    assert costs(loop, warps=8, rebuilt=left_entries) == {"products": "mma", "slots": 3 * 32 / 256}
    # Without products, all instructions count, for each entry of the tile.
    assert costs(code("MOV R1, R2", "EXIT"), warps=4, rebuilt=left_entries, tile=(64,)) == {"slots": 2 * 4 * 32 / 64}


def test_amds_loops_are_read_by_their_labels():
    product = "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]"
    listing = f".LBB0_1:\n\tv_mov_b32 v0, v1\n{product}\n\ts_cbranch_scc1 .LBB0_1\n\ts_endpgm\n"
    assert len(main_loop(amdgcn(listing))) == 3
