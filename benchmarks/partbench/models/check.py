"""check_positive: the check of all architectures' sizes."""

from __future__ import annotations


def check_positive(**sizes: int) -> None:
    """Raise ValueError for the first size that is not a positive integer.

    Example:
        >>> check_positive(width=64, classes=0)
        Traceback (most recent call last):
        ValueError: classes=0; pass a positive integer.
    """
    for name, size in sizes.items():
        if not (isinstance(size, int) and size > 0):
            raise ValueError(f"{name}={size}; pass a positive integer.")
