"""The Triton kernels as they are compiled for GPUs that are not there: what can be told of them without one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tritons import OLDEST, compiling, needs_oldest

from benchmarks.triton_kernels import Kernel
from benchmarks.without_gpu import TARGETS

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "triton-kernels.md"
NVIDIA = ("sm_90", "sm_80")


def kernels_and_table(folder: Path, *arguments: str, triton: Path | None = None) -> tuple[list[Kernel], str]:
    out = folder / "kernels.md"
    command = "-m", "benchmarks.triton_kernels", "--json", "--out", out, *arguments
    return [Kernel(**kernel) for kernel in json.loads(compiling(*command, triton=triton))], out.read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[list[Kernel], str]:
    return kernels_and_table(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def kernels(made) -> dict[str, list[Kernel]]:
    """Those of each target that it compiles."""
    return {
        target: [kernel for kernel in made[0] if kernel.target == target and not kernel.error] for target in TARGETS
    }


@pytest.fixture(scope="module")
def products(kernels) -> list[Kernel]:
    """Those for Hopper that multiply matrices."""
    return [kernel for kernel in kernels["sm_90"] if kernel.has_dot]


def none(kernels: list[Kernel], is_bad: Callable[[Kernel], object]) -> None:
    """Fails if there are no kernels, or if is_bad finds something in one of them."""
    assert kernels
    found = [(kernel, is_bad(kernel)) for kernel in kernels if is_bad(kernel)]
    if found:
        lines = (f"{bad}: {k.case}: {k.name}, {k.tile}, {k.warps} warps, {k.stages} stages" for k, bad in found)
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("target", TARGETS)
def test_every_case_compiles(made, target):
    none([kernel for kernel in made[0] if kernel.target == target], lambda kernel: kernel.error)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_backend_is_in_some_case(kernels, target):
    files = (ROOT / "partkernels" / "triton").glob("*.py")
    names = {
        f"{file.stem}.{name}" for file in files for name in re.findall(r"(?m)^def (\w+_kernel)\(", file.read_text())
    }
    assert names == {kernel.name for kernel in kernels[target]}


@pytest.mark.parametrize("target", NVIDIA)
def test_no_kernel_spills_registers(kernels, target):
    none(kernels[target], lambda kernel: kernel.spilled)


@needs_oldest
def test_by_the_oldest_triton_every_case_compiles_and_none_spills(tmp_path):
    none(
        kernels_and_table(tmp_path, "--targets", *NVIDIA, triton=OLDEST)[0],
        lambda kernel: kernel.error or kernel.spilled,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_is_within_a_blocks(kernels, target):
    none(kernels[target], lambda kernel: max(0, kernel.shared - TARGETS[target].shared_memory))


def test_hopper_multiplies_by_wgmma(products):
    none(products, lambda kernel: kernel.wgmma == 0)


def test_no_wgmma_waits_for_another(products):
    none(products, lambda kernel: kernel.serialized)


@pytest.mark.parametrize(("defaults", "most"), [("zeros", 6), ("uniform", 14)])
def test_issue_slots_of_the_forward_pass_are_few(products, defaults, most):
    case = f"bfloat16, 2-bit map, {defaults}"
    forward = [k for k in products if k.name.endswith("forward_kernel") and k.case.endswith(case)]
    none(forward, lambda kernel: kernel.slots if kernel.slots > most else 0)


def test_the_committed_table_is_what_is_made(made):
    committed = COMMITTED.read_text()
    its_version = re.search(r"Triton\s(\d\S*\d)", committed)[1]
    if triton.__version__ != its_version:
        pytest.skip(f"the table is of Triton {its_version}, and this is Triton {triton.__version__}")
    assert made[1] == committed, f"run python -m benchmarks.triton_kernels --out {COMMITTED.relative_to(ROOT)}"
