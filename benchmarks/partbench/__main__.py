"""`python -m partbench`; see cli."""

import sys

from partbench import needing

with needing("bench"):
    from partbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
