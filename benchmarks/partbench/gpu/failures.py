"""failures: a pytest plugin that prints the cause of each failure at once, so that a killed run still shows it."""


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
