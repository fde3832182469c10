"""A History's report has the numbers, is self-contained, escapes users' names, and is written atomically."""

import html.parser
import re
import sys

import pytest

from partnets import History
from partnets.utils import files

MATRIX = [[0.31, 0.62, 0.71], [0.33, 0.35, 0.66], [0.34, 0.36, 0.37]]
HOSTILE = "\"><img src=x onerror=alert(1)> $x_1$ <script>alert(2)</script> '&amp;"


def recorded(steps=40, name="augmentation.rotation"):
    """Return a history with steps of ψ at even steps and the highest L_ML in the middle."""
    history = History()
    for step in range(1, steps + 1):
        psi = (2, 1.0 + step) if step % 2 == 0 else (None, None)
        history.add(step, 1 + step % 3, 1 / step, *psi, {name: 7.0 + step})
        if step % 10 == 0:
            history.add_lml(step, -100.0 - abs(step - steps / 2))
            history.add_metrics(step, {"test accuracy": step / 100})
    history.add_matrix(steps, MATRIX)
    return history


class Page(html.parser.HTMLParser):
    """A parser of tags with attributes, rows of table cells as text, and (row, column) of marked cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.marked, self.cell = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if self.cell:
            self.rows[-1].append("")
            if ("class", "lml") in attributes:
                self.marked.append((len(self.rows), len(self.rows[-1])))

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data


def page(history, path):
    history.report(path)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_the_numbers_in_the_users_units(tmp_path):
    rows = page(recorded(), tmp_path / "training.html").rows
    assert ["final L_ML [nats]", "-120", "at step 40"] in rows and ["best L_ML [nats]", "-100", "at step 20"] in rows
    assert ["hyperparameter", "after step 1", "after step 40"] in rows and ["augmentation.rotation", "8", "47"] in rows
    assert ["test accuracy", "0.4", "40"] in rows
    assert rows[-4:] == [
        ["", "chunk 1", "chunk 2", "chunk 3"],
        *([f"subnetwork {k}", *map(str, row)] for k, row in enumerate(MATRIX, start=1)),
    ]


@pytest.mark.full
def test_the_page_marks_the_terms_of_lml(tmp_path):
    marked = page(recorded(), tmp_path / "training.html")
    last = len(marked.rows)
    assert marked.marked == [(last - 2, 3), (last - 1, 4)]  # subnetwork 1 on chunk 2, 2 on 3, after headers


@pytest.mark.full
def test_the_page_asks_for_nothing_runs_nothing_and_escapes_names(tmp_path):
    history = recorded(name=HOSTILE)
    history.add_metrics(40, {HOSTILE + "metric": 1.0})
    written = page(history, tmp_path / "training.html")
    assert [row[0] for row in written.rows if row[0].startswith(HOSTILE)] == [HOSTILE + "metric", HOSTILE]
    assert not {tag for tag, _ in written.tags} & {"script", "img", "link", "iframe", "object", "form", "base"}
    attributes = [(name, value) for _, found in written.tags for name, value in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    links = [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    style = (tmp_path / "training.html").read_text(encoding="utf-8").partition("</style>")[0]
    assert "@import" not in style and "url(" not in style


@pytest.mark.full
def test_the_page_follows_the_readers_scheme(tmp_path):
    recorded().report(tmp_path / "training.html")
    text = (tmp_path / "training.html").read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        texts = re.findall(r"<text [^>]*>", svg)
        assert texts and all("fill: currentColor" in tag for tag in texts)
        assert not re.search(r"#(fff|000)", svg)  # no white background, no black lines


@pytest.mark.full
def test_the_page_of_a_long_training_stays_small(tmp_path):
    history = recorded(5000)
    history.report(tmp_path / "training.html")
    assert (tmp_path / "training.html").stat().st_size < 400_000


@pytest.mark.full
def test_the_same_history_gives_the_same_bytes(tmp_path):
    for name in "ab":
        recorded().report(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_many_hyperparameters_are_folded(tmp_path):
    history = History()
    history.add(1, 1, 0.5, 2, 0.6, {f"mask.{i}": 0.5 for i in range(30)})
    written = page(history, tmp_path / "training.html")
    assert "details" in dict(written.tags) and ["mask.29", "0.5", "0.5"] in written.rows


@pytest.mark.full
def test_an_interruption_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "training.html"
    recorded().report(path)
    before = path.read_bytes()

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorded(50).report(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_history_without_steps_has_no_report(tmp_path):
    with pytest.raises(ValueError, match=r"call Trainer\.fit first"):
        History().report(tmp_path / "training.html")
    assert not list(tmp_path.iterdir())


def test_a_report_names_the_missing_library_and_the_cure(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib, or partkernels' extra 'plot'"):
        recorded().report(tmp_path / "training.html")
    assert not list(tmp_path.iterdir())
