"""failures: a plugin of pytest that says of each test that fails why, at once: a run that is killed has said it too."""


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
