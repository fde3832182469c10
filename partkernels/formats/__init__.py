"""Bit-level formats, as docs/formats.md lists them: the packed map, and the generator behind maps and defaults."""
