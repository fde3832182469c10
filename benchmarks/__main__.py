"""What `python -m benchmarks` was until it could be installed."""

import sys

sys.exit("The benchmarks are the package partbench: python -m partbench, after installing partkernels' extra 'bench'.")
