"""Tests of the kernels that are compiled for GPUs, without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tritons import OLDEST, compiling, needs_oldest

triton = pytest.importorskip("triton")

from partbench.compiled_kernels.kernels import Kernel  # noqa: E402
from partbench.compiled_kernels.without_gpu import TARGETS  # noqa: E402

pytestmark = pytest.mark.full  # compiling takes two minutes

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "compiled-kernels.md"
NVIDIA = ("sm_90", "sm_80")


Made = tuple[dict[str, list[Kernel]], str]


def kernels_and_pages(folder: Path, *arguments: str, triton: Path | None = None) -> Made:
    """Return the kernels of both backends, and their table.

    The CUDA library is read if it has been built, as by `make wheel`.
    """
    out = folder / "kernels.md"
    command = "-m", "partbench.compiled_kernels", "--built", "--json", "--out", out, *arguments
    # Measurements of this machine must not replace the defaults.
    found = json.loads(compiling(*command, triton=triton, PARTKERNELS_CACHE=str(folder)))
    kernels = {backend: [Kernel(**kernel) for kernel in those] for backend, those in found.items()}
    return kernels, out.read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return kernels_and_pages(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def library(made) -> list[Kernel]:
    """Return the CUDA library's kernels for Hopper that multiply matrices."""
    if not made[0]["cuda"]:
        pytest.skip("the CUDA library is not built of these sources: `make wheel` builds it, with nvcc")
    return [kernel for kernel in made[0]["cuda"] if kernel.target == "sm_90" and kernel.products]


@pytest.fixture(scope="module")
def kernels(made) -> dict[str, list[Kernel]]:
    """Return each target's Triton kernels that compile."""
    return {
        target: [kernel for kernel in made[0]["triton"] if kernel.target == target and not kernel.error]
        for target in TARGETS
    }


@pytest.fixture(scope="module")
def products(kernels) -> list[Kernel]:
    """Return the Triton kernels for Hopper that multiply matrices."""
    return [kernel for kernel in kernels["sm_90"] if kernel.products]


def none(kernels: list[Kernel], is_bad: Callable[[Kernel], object]) -> None:
    """Fail if there are no kernels, or if is_bad finds something in one of them."""
    assert kernels
    found = [(kernel, is_bad(kernel)) for kernel in kernels if is_bad(kernel)]
    if found:
        lines = (f"{bad}: {k.case}: {k.name}, {k.tile}, {k.warps} warps, {k.stages} stages" for k, bad in found)
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_backend_is_in_some_case(kernels, target):
    files = (ROOT / "partkernels" / "backend" / "triton").glob("*.py")
    names = {
        f"{file.stem}.{name}" for file in files for name in re.findall(r"(?m)^def (\w+_kernel)\(", file.read_text())
    }
    assert names == {kernel.name for kernel in kernels[target]}


@needs_oldest
def test_by_the_oldest_triton_every_case_compiles_and_none_spills(tmp_path):
    kernels = kernels_and_pages(tmp_path, "--targets", *NVIDIA, triton=OLDEST)[0]["triton"]
    none(kernels, lambda kernel: kernel.error or kernel.spilled)


@pytest.mark.parametrize("target", TARGETS)
def test_every_case_compiles_without_spills_and_within_a_blocks_shared_memory(made, kernels, target):
    none([kernel for kernel in made[0]["triton"] if kernel.target == target], lambda kernel: kernel.error)
    none(kernels[target], lambda kernel: target in NVIDIA and kernel.spilled)
    none(kernels[target], lambda kernel: max(0, kernel.shared - TARGETS[target].shared_memory))


def test_hopper_multiplies_by_wgmma_and_none_waits_for_another(products):
    # wgmma takes at least 64 rows.
    none([kernel for kernel in products if kernel.tile[0] >= 64], lambda kernel: kernel.products != "wgmma")
    none(products, lambda kernel: kernel.serialized)


@pytest.mark.parametrize(("defaults", "most"), [("zeros", 6), ("uniform", 14)])
def test_slots_of_the_forward_pass_are_few(products, defaults, most):
    case = f"bfloat16, 2-bit map, {defaults}"
    forward = [k for k in products if k.name.endswith("forward_kernel") and k.case.endswith(case)]
    none(forward, lambda kernel: kernel.slots if kernel.slots > most else 0)


def test_kernels_of_the_library_have_their_slots_counted_and_spill_no_registers(made, library):
    none(library, lambda kernel: kernel.slots is None)
    none(made[0]["cuda"], lambda kernel: kernel.spilled)


def sections(table: str) -> dict[str, str]:
    """Return sections by their headings, which name a version of a compiler."""
    return dict(re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", table))


def test_the_committed_table_equals_the_generated_one(made):
    committed, found = sections(COMMITTED.read_text()), sections(made[1])
    same = {heading: rest for heading, rest in found.items() if heading in committed}
    if not same:
        pytest.skip(f"the table is of other compilers: {', '.join(committed)}")
    command = f"python -m partbench.compiled_kernels --out {COMMITTED.relative_to(ROOT)}"
    for heading, rest in same.items():
        assert rest.strip() == committed[heading].strip(), f"run {command}"
