from benchmarks.presets import PRESETS


def pytest_addoption(parser):
    group = parser.getgroup("partkernels")
    group.addoption("--preset", choices=PRESETS, default="quick", help="what under_pytest.py measures")
