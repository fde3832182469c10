"""The faults of mutants.py can be applied: the source has each replaced text exactly once, and the tests exist."""

import mutants
import pytest
from processes import run_python


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source(mutant):
    assert (mutants.ROOT / mutant.file).read_text().count(mutant.line) == 1
    assert mutant.by != mutant.line and mutant.breaks
    assert all((mutants.ROOT / path).exists() for path in mutant.tests)


def test_a_mutant_of_another_source_raises(tmp_path):
    mutant = mutants.Mutant("one", "a.py", "x = 1", "x = 2", "x", ())
    for source in ("x = 3", "x = 1\nx = 1"):
        (tmp_path / "a.py").write_text(source)
        with pytest.raises(ValueError, match=r"mutant 'one': a\.py has 'x = 1' . times instead of once"):
            mutant.apply(tmp_path)
    (tmp_path / "a.py").write_text("x = 1")
    mutant.apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 2"


def test_what_is_imported_before_a_test_is_not_triton():
    """Check that Triton is not preloaded: its kernels would not be interpreted, and their tests would always fail."""
    code = f"import {', '.join(mutants.IMPORTED)}, sys; print('triton' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"
