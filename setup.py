"""Builds the C++ backend through PyTorch's stable ABI and records what was built, and with what.

PARTKERNELS_BUILD unset  builds it if that works; if not, `python -m partkernels` says what is missing
PARTKERNELS_BUILD=cpu    demands it: no compiler, or a failing one, is an error
PARTKERNELS_BUILD=none   builds nothing
"""

import json
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
TORCH = Path(torch.__file__).parent
ASKED = os.environ.get("PARTKERNELS_BUILD", "")
if ASKED not in ("", "cpu", "none"):
    raise ValueError(f"PARTKERNELS_BUILD={ASKED} asks for a backend that this version cannot build; pass cpu or none.")

# 2.10: the oldest PyTorch whose stable ABI has all that the binding calls (parallel_for).
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
# Python's own flags have -fwrapv, which hinders the optimiser: with it, products took 1.3 to 1.6 times as long.
FLAGS += ["-fno-wrapv"]
# A loop becomes vectors only if its square roots need not set errno.
FLAGS += ["-fno-math-errno"]
SOURCES = sorted(path for folder in ("cpu", "torch") for path in (ROOT / "csrc" / folder).glob("*.cpp"))
HEADERS = sorted((ROOT / "csrc").rglob("*.h"))


def compiler_version() -> str:
    """The first line of what the C++ compiler says of itself; empty if there is none."""
    configured = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
    found = next(filter(None, map(shutil.which, (configured, "g++", "c++"))), None)
    if found is None:
        return ""
    return subprocess.run([found, "--version"], capture_output=True, text=True).stdout.partition("\n")[0] or found


class BuildBackends(build_ext):
    """Builds a plain shared library for torch.ops.load_library, and build_info.json beside it."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        return extension.export_symbols  # it is no Python module and has no PyInit function

    def build_extensions(self):
        compile = self.compiler.compile

        def compile_together(sources, **options):
            """Each instruction set is a file that takes ten seconds and more: all processors compile."""
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                return [*chain(*threads.map(lambda source: compile([source], **options), sources))]

        self.compiler.compile = compile_together
        super().build_extensions()

    def run(self):
        facts = {"torch": torch.__version__, "flags": " ".join(FLAGS), "compiler": compiler_version()}
        facts["cpu"] = self.build_cpu(facts["compiler"])
        folders = [Path(self.build_lib)] + ([ROOT] if self.inplace else [])
        for folder in folders:
            (folder / "partkernels").mkdir(parents=True, exist_ok=True)
            (folder / "partkernels" / "build_info.json").write_text(json.dumps(facts, indent=1) + "\n")

    def build_cpu(self, compiler: str) -> str:
        """Builds the C++ backend; returns 'built', or why not and the cure."""
        if ASKED == "none":
            return "not built: PARTKERNELS_BUILD=none; reinstall partkernels without it"
        try:
            if not compiler:
                raise RuntimeError("there is no C++ compiler; install one (on Debian: apt install g++)")
            super().run()
        except Exception as error:
            if ASKED:
                raise
            problem = f"not built: {error}; then reinstall partkernels with PARTKERNELS_BUILD=cpu"
            self.warn(problem)
            return problem
        return "built"


class AnyPythonWheel(bdist_wheel):
    """The library is compiled for a platform, not for a version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "partkernels._cpu",
            sources=[str(path.relative_to(ROOT)) for path in SOURCES],
            depends=[str(path.relative_to(ROOT)) for path in HEADERS],
            include_dirs=["csrc/include", "csrc/cpu", str(TORCH / "include")],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu"],
            language="c++",
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildBackends, "bdist_wheel": AnyPythonWheel},
)
