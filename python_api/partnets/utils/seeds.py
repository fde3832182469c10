"""Seeds: one for each thing that is drawn, from one that the user gives."""

from __future__ import annotations

import hashlib

import torch


def derived(seed: int, name: str) -> int:
    """A seed in [0, 2**63) of its own for each name, the same everywhere.

    Example:
        >>> derived(0, "encoder.0") == derived(0, "encoder.0"), derived(0, "encoder.0") == derived(0, "encoder.1")
        (True, False)
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << 63) - 1)


def random() -> int:
    """A seed from torch's global generator: reproducible under torch.manual_seed, another at each call."""
    return int(torch.randint((1 << 63) - 1, (), device="cpu"))
