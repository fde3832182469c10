"""The Python code of the README and of the pages in docs runs unchanged."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The number of code blocks of each page, and a variable with the name of its type after all blocks have run.
PAGES = {
    "README.md": (1, "result", "Tuned"),
    "docs/tuning.md": (1, "result", "Tuned"),
    "docs/hyperparameters.md": (4, "noise", "Noise"),
    "docs/kernels.md": (2, "nested", "NestedPartition"),
    "docs/formats.md": (1, "partition", "Partition"),
    "docs/numpy.md": (1, "partition", "Partition"),
    "docs/nested.md": (2, "small", "Sequential"),
    "docs/tutorial.md": (9, "deployed", "GraphModule"),
    "docs/data.md": (6, "history", "History"),
    "docs/training.md": (10, "history", "History"),
    "docs/layers.md": (3, "model", "Centred"),
    "docs/stn.md": (2, "history", "History"),
    "docs/federated.md": (3, "found", "Round"),
    "docs/export.md": (4, "loaded", "Sequential"),
    "docs/integrations.md": (6, "bert", "BertForSequenceClassification"),
}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_every_link_of_a_page_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_index_names_every_page():
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("paper/")} - {"index"}  # paper.md lists the experiments
    assert sorted(pages.difference(listed)) == []


@pytest.mark.parametrize("header", ["cpu.h", "cuda.h"])
def test_the_page_on_the_cpp_library_names_every_function_and_type(header):
    page = (ROOT / "docs" / "cpp.md").read_text()
    text = (ROOT / "csrc" / "include" / "partkernels" / header).read_text()
    found = re.findall(r"^(?:enum |const )?[\w:<>*]+ (?:\[\[\w+\]\] )?(\w+)(?= = | \{|\()", text, re.M)
    assert len(found) >= 10
    assert [name for name in found if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_have_code(page):
    assert len(blocks(page)) == PAGES[page][0]


# Ignore the warnings of Lightning and transformers about a small training without a GPU.
@pytest.mark.cases(usual=3)
@pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # peft reads this attribute
    "ignore:'pin_memory' argument is set as true",
)
# The tutorial takes as long as all other pages together.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] if page == "docs/tutorial.md" else []) for page in PAGES]
)
def test_the_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    if page == "docs/federated.md":
        pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(page):
        exec(block, names)
    _, name, kind = PAGES[page]
    assert type(names[name]).__name__ == kind
