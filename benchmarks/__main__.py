"""A stub for `python -m benchmarks` that points to the package partbench."""

import sys

sys.exit("The benchmarks are the package partbench: python -m partbench, after installing partkernels' extra 'bench'.")
