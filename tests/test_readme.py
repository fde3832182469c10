"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import partnets

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_code():
    assert len(BLOCKS) == 4


def test_the_readmes_code_runs_from_top_to_bottom():
    names = {}
    for block in BLOCKS:
        exec(block, names)
    assert isinstance(names["history"], partnets.History)
