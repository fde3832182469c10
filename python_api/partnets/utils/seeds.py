"""Seeds: derivation of a separate seed for each random object from the user's seed."""

from __future__ import annotations

import hashlib

import torch


def derived(seed: int, name: str) -> int:
    """Return a seed in [0, 2**63) that depends on seed and name, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << 63) - 1)


def random() -> int:
    """Draw a seed from torch's global generator: reproducible by torch.manual_seed, different at each call."""
    return int(torch.randint((1 << 63) - 1, (), device="cpu"))
