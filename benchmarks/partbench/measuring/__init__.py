"""Measurement: clocks, alternating peers, peaks of memory, the machine, and medians with their intervals."""
