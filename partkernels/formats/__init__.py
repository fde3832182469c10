"""Bit-level formats, listed in docs/formats.md: the packed map, and the generator behind maps and defaults."""
