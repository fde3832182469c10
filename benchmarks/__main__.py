"""`python -m benchmarks`, from the root of a checkout; see cli."""

import sys
from pathlib import Path

# A checkout that is not installed finds its own packages.
sys.path.append(str(Path(__file__).parents[1] / "python_api"))

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
