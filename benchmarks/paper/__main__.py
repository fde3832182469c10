"""The command line: python -m benchmarks.paper EXPERIMENT."""

import sys

from benchmarks.paper.cli import main

if __name__ == "__main__":
    sys.exit(main())
