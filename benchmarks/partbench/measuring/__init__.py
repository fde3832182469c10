"""How things are measured: clocks, peers that take turns, peaks of memory, the machine; medians and their intervals."""
