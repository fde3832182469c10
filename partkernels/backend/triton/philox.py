"""Philox4x32-7 inside a kernel; it is defined in partkernels.formats.philox."""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.formats import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return four random words for each counter (c0, c1, c2, c3), with the key (k0, k1).

    All are uint32; arguments broadcast. See docs/formats.md and partkernels.formats.philox. Products are computed in 64
    bits, in one instruction; computing their two halves separately would take two.
    """
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
