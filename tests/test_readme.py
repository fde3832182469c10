"""The Python of the README and of the pages on training and on layers runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

import partnets

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": 4, "docs/training.md": 4, "docs/layers.md": 2}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(("page", "count"), PAGES.items())
def test_the_pages_have_code(page, count):
    assert len(blocks(page)) == count


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs_from_top_to_bottom(page):
    names = {}
    for block in blocks(page):
        exec(block, names)
    assert any(isinstance(made, partnets.History | torch.nn.Module) for made in names.values())
