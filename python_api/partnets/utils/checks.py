"""Checks of arguments that several modules share."""

from __future__ import annotations


def check_at_least(least: int, **numbers: int) -> None:
    """Raise ValueError, naming the argument, unless each number is an int of at least `least`."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r}; pass an int, at least {least}.")
