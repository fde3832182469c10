"""Start Python processes for tests by forking one that has imported torch: in a tenth of a second instead of three.

That process has imported neither Triton, which reads the environment at import, nor the project. Use subprocess if the
program must import torch itself, needs options of Python, or depends on `atexit`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "numpy"])


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path = ".",
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python as subprocess.run([sys.executable, *arguments], capture_output=True, text=True) does.

    Args:
        arguments: a path or -m and a module or -c and code, then the program's own.
        environment: all of the process's variables; by default those of this one.

    Raises:
        subprocess.TimeoutExpired: after so many seconds.
        subprocess.CalledProcessError: with check, if the process fails.
    """
    arguments = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / "stdout", Path(folder) / "stderr"]
        environment = dict(os.environ if environment is None else environment)
        process = CONTEXT.Process(target=_run, args=(arguments, environment, os.path.abspath(cwd), said))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        output = [path.read_text() if path.exists() else "" for path in said]
    done = subprocess.CompletedProcess([sys.executable, *arguments], process.exitcode, *output)
    if check:
        done.check_returncode()
    return done


def _run(arguments: list[str], environment: dict[str, str], cwd: str, said: list[Path]) -> None:
    for stream, path in enumerate(said, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
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
