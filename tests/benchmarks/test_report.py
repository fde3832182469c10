"""Tests of the HTML page: it shows all measurements, and loads nothing."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from html.parser import HTMLParser

import pytest
from simulated import BARE, PARTITIONING, timed

from partbench import summary
from partbench.report import page
from partbench.results import Record, Results

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Document(HTMLParser):
    """A page as a browser reads it: rows of tables, loaded resources, and tags that are not closed properly."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.misplaced: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(f"{tag} at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()


def speed(
    work: str = "forward", shape: str = "32×64×64", active: int = 1, *, count: int = 6, **seconds
) -> list[Record]:
    case = {"operator": "linear", "work": work, "shape": shape, "dtype": "float32", "device": "cpu", **PARTITIONING}
    seconds = {"dense": 2e-3, "where": 6e-3, "partkernels cpu": 3e-3} | seconds
    return timed("speed", case | {"active": active}, seconds, count=count, flops=1e8, bytes=1e6)


def memory(by_arithmetic: bool = False, model: str = "MNIST CNN") -> list[Record]:
    facts = {"name": model, "parameters": 1000, "weights": 800, "dense layers": "LayerNorm", "entropy": 0.92}
    facts |= {"how": "by arithmetic"} if by_arithmetic else {}
    kept = {
        "dense": (4000, 0, 0, 8000),
        "paper": (4000, 800, 3200, 8000),
        "partkernels cpu": (4000, 200, 0, 8000),
        "floor": (4000, 92, 0, 8000),
    }
    records = []
    for peer, values in kept.items():
        figures = dict(zip(("parameters", "map", "defaults", "state"), values, strict=True))
        if not by_arithmetic:
            figures |= {"peak of forward, by allocator": 1.25 * sum(values), "peak of step, by process": sum(values)}
        case = {"model": model, "batch": 8, "optimizer": "adam", "device": "cpu", **PARTITIONING}
        records += [
            Record("memory", {**case, "figure": figure}, peer, "B", [[value]], facts=facts)
            for figure, value in figures.items()
        ]
    return records


def step(model: str = "ResNet-8", partitions: int = 3, *, count: int = 6) -> list[Record]:
    seconds = {"dense": 0.1, "paper, parameters": 0.13, "partkernels cpu, parameters": 0.11}
    seconds |= {"paper, hyperparameters": 0.12, "partkernels cpu, hyperparameters": 0.105}
    case = {"model": model, "batch": 8, "samples": 1, "optimizer": "sgd", "device": "cpu", **PARTITIONING}
    case |= {"partitions": partitions, "active": 2}
    facts = {"share of parameters": 0.1, "share of hyperparameters": 0.5}
    return timed("step", case, seconds, count=count, **facts)


def optim(*, count: int = 6) -> list[Record]:
    case = {"model": "ResNet-8", "optimizer": "adam", "device": "cpu", **PARTITIONING, "update": 3}
    seconds = {"torch, fused": 1e-4, "torch, foreach": 2e-4, "partnets": 5e-5}
    return timed("optim", case, seconds, count=count, share=0.1)


def results(*records: list[Record], **changed) -> Results:
    return dataclasses.replace(BARE, records=[record for group in records for record in group], **changed)


def whole(**changed) -> Results:
    points = [step("ResNet-14"), *(step(partitions=n) for n in (2, 8))]
    training = speed("training", "8×4×8×8, 4×4×3×3, padding 1", 3, parametrize=7e-3, paper=8e-3)
    return results(speed(), training, memory(), memory(True, "Large"), step(), *points, optim(), **changed)


def without(record: Record, **why) -> Record:
    return dataclasses.replace(record, samples=[], **why)


def holed() -> Results:
    """Return results with missing figures."""
    records = speed()
    records[2] = without(records[2], refused="off by 0.1, and 0.01 is allowed")
    other = speed("training")
    other[1] = without(other[1], missing="failed: RuntimeError: no memory")
    third = speed("grad input")
    third[2] = without(third[2], missing="there is no CUDA device")
    return results(records, other, third)


def two_pages() -> str:
    gpu = {"machine": {"processor": "Some CPU", "gpu": "Some GPU"}, "commit": "fedcba9876543210"}
    return page([whole(), whole(**gpu)])


PAGES = {
    "all suites": lambda: page([whole()]),
    "one pass": lambda: page([results(speed(count=1), step(count=1), optim(count=1))]),
    "two files": two_pages,
    "figures missing": lambda: page([holed()]),
    "no records": lambda: page([BARE]),
}


@cache
def made(name: str) -> Document:
    """Return one of PAGES, cached because drawing it takes seconds."""
    return Document(PAGES[name]())


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_loads_nothing(name):
    document = made(name)
    assert document.misplaced == [] and document.open == []
    assert len(document.ids) == len(set(document.ids))
    for tag, name, value in document.attributes:
        assert name not in ("src", "srcset", "data", "action", "poster")
        assert tag not in ("link", "img", "iframe", "base")
        if name in ("href", "xlink:href"):
            assert value.startswith("#") and value[1:] in document.ids
    assert not re.search(r"@import|url\([^#]|https?:|//\w+\.\w+|fetch\(|import\(", document.html)


def test_tables_show_the_figures_that_were_computed():
    document = made("all suites")
    # 1e8 operations at 1e11 a second take at least 1 ms.
    assert ["forward", "32×64×64", "1", "dense", "2.00 ms 2.00–2.00", "", "50 %"] in document.rows
    assert ["partkernels cpu", "3.00 ms 3.00–3.00", "1.50× 1.50–1.50", "33 %"] in document.rows
    assert ["where", "6.00 ms 6.00–6.00", "3.00× 3.00–3.00", "17 %"] in document.rows
    memory = ["4", "0.2", "0", "8", "1.017 by allocator, 1.017 by process"]
    assert ["MNIST CNN, partkernels cpu", *memory] in document.rows
    assert ["partkernels cpu", "200 B", ""] in document.rows
    costs = ["1.10", "1.05", "2.15", "1.17, 1.08"]
    assert ["ResNet-8, batch 8, 1 sample, partkernels cpu", *costs] in document.rows
    assert ["partkernels cpu, parameters", "110 ms 110–110", "1.10× 1.10–1.10"] in document.rows
    assert ["partnets", "50.0 µs 50.0–50.0", "0.50× 0.50–0.50"] in document.rows


def test_a_refused_figure_is_a_warning_near_the_top_and_has_its_reason_in_place_of_a_number():
    document = made("figures missing")
    html = document.html
    top = html[: html.index("<article")]
    assert "off by 0.1, and 0.01 is allowed" in top and "RuntimeError: no memory" in top
    assert "there is no CUDA device" not in top and "there is no CUDA device" in document.text
    assert ["partkernels cpu", "refused: off by 0.1, and 0.01 is allowed"] in document.rows
    assert ["where", "failed: RuntimeError: no memory"] in document.rows
    assert ["partkernels cpu", "there is no CUDA device"] in document.rows


def test_one_pass_has_no_interval():
    document = made("one pass")
    assert not re.search(r'<span class="interval">[^<]', document.html)
    assert "With 1 pass there is no interval." in document.text


def test_an_interrupted_run_is_summarised_by_its_complete_passes():
    records = step(count=3)
    further = [dataclasses.replace(one, case=one.case | {"active": 3}, samples=one.samples[:2]) for one in records]
    row = summary.step([*records, *further]).set_index("scheme").loc["partkernels cpu"]
    assert row.parameters.value == pytest.approx(1.1) and row.parameters.confidence == 0.5


def test_words_from_a_file_cannot_become_markup():
    evil = '<script>alert(1)</script>"onload="x'
    records = speed(shape=evil)
    records[1] = without(records[1], refused=evil)
    run = results(records, command=evil, machine={"processor": evil})
    html = page([run])
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    document = Document(html)
    assert document.misplaced == [] and not [name for _, name, _ in document.attributes if name == "onload"]
