"""Python processes for tests, forked from one that has imported torch: they start in 0.1 instead of 3 seconds.

The parent process has imported neither the project nor Triton, which reads the environment at import. Use subprocess if
the program must import torch itself, needs options of Python or another hash seed, or depends on Python's shutdown:
`atexit`, unclosed files, background processes that still write.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "numpy"])
# A forked process applies only these of Python's environment variables. Python reads the others when it starts.
TAKEN_UP = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
STARTED_WITH = dict(os.environ)

_spent = 0.0


def seconds_spent() -> float:
    """Return the processor seconds of all run_python processes so far that reached the end of their program."""
    return _spent


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path = ".",
    timeout: float = 600,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python like subprocess.run([sys.executable, *arguments], capture_output=True, text=True).

    Args:
        arguments: a path, "-m" and a module, or "-c" and code; then the program's arguments.
        environment: all environment variables of the process; by default those of this process.

    Raises:
        ValueError: if the environment changes a variable that Python reads only when it starts.
        subprocess.TimeoutExpired: if the process runs longer than `timeout` seconds.
        subprocess.CalledProcessError: if `check` and the process fails.
    """
    global _spent
    arguments = [str(argument) for argument in arguments]
    environment = dict(os.environ if environment is None else environment)
    late = [name for name in sorted({*environment, *STARTED_WITH}) if name.startswith("PYTHON")]
    late = [name for name in late if name not in TAKEN_UP and environment.get(name) != STARTED_WITH.get(name)]
    if late:
        raise ValueError(f"{', '.join(late)} cannot change in a process that is forked; use subprocess.run")
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr", "seconds")]
        process = CONTEXT.Process(target=_run, args=(arguments, environment, os.path.abspath(cwd), said))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            *output, _ = map(_read, said)
            raise subprocess.TimeoutExpired([sys.executable, *arguments], timeout, *output)
        *output, seconds = map(_read, said)
    _spent += float(seconds or 0)
    done = subprocess.CompletedProcess([sys.executable, *arguments], process.exitcode, *output)
    if check:
        done.check_returncode()
    return done


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""  # a killed process may not have created its files


def _run(arguments: list[str], environment: dict[str, str], cwd: str, said: list[Path]) -> None:
    *streams, seconds = said
    for stream, path in enumerate(streams, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if "OMP_NUM_THREADS" in environment:  # torch read the old value when it was imported
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        _execute(arguments, environment, cwd)
    finally:
        seconds.write_text(str(sum(os.times()[:4])))


def _execute(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    what, *rest = arguments
    first = {"-c": "", "-m": cwd}.get(what, os.path.dirname(os.path.abspath(what)))
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv = ["-c", *rest[1:]] if what == "-c" else rest if what == "-m" else arguments
    if what == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    elif what == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(what), run_name="__main__")
