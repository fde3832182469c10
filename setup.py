"""Builds the C++ backend through PyTorch's stable ABI and records what was built, and with what.

PARTKERNELS_BUILD=cpu demands the C++ backend: without a compiler, or if it does not compile, installation fails.
Unset, installation succeeds without it, and `python -m partkernels` says what is missing.
PARTKERNELS_BUILD=none builds no backend.
"""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
# The oldest PyTorch whose stable ABI has all that the binding calls (parallel_for).
STABLE_ABI = "0x020a000000000000"
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
CURE = "install one (on Debian: apt install g++) and reinstall partkernels"
ASKED = os.environ.get("PARTKERNELS_BUILD", "")


class BuildBackends(build_ext):
    """Builds plain shared libraries for torch.ops.load_library, no Python modules."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        return extension.export_symbols  # no PyInit

    def run(self):
        facts = {"torch": torch.__version__, "flags": " ".join(FLAGS), "compiler": self._compiler()}
        facts["cpu"] = self._build(facts["compiler"])
        for folder in {Path(self.build_lib) / "partkernels"} | ({ROOT / "partkernels"} if self.inplace else set()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "build_info.json").write_text(json.dumps(facts, indent=1) + "\n")

    def _compiler(self) -> str:
        command = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
        found = shutil.which(command) or shutil.which("g++") or shutil.which("c++")
        if found is None:
            return ""
        return subprocess.run([found, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]

    def _build(self, compiler: str) -> str:
        """Builds the C++ backend; returns 'built' or why not and the cure."""
        if ASKED == "none":
            return "not built, as PARTKERNELS_BUILD=none asked; reinstall partkernels without it"
        if not compiler:
            problem = f"not built: there is no C++ compiler; {CURE}"
            if ASKED:
                raise RuntimeError(problem)
            return problem
        try:
            super().run()
        except Exception as error:
            if ASKED:
                raise
            problem = (
                f"not built: {compiler} failed ({error}); reinstall partkernels with PARTKERNELS_BUILD=cpu to see why"
            )
            self.warn(problem)
            return problem
        return "built"


if ASKED not in ("", "cpu", "none"):
    raise RuntimeError(
        f"PARTKERNELS_BUILD={ASKED} asks for a backend that this version cannot build; pass cpu or none."
    )

TORCH = Path(torch.__file__).parent
setup(
    ext_modules=[
        Extension(
            "partkernels._cpu",
            sources=[
                str(p.relative_to(ROOT))
                for p in [*sorted((ROOT / "csrc/cpu").glob("*.cpp")), ROOT / "csrc/torch/cpu.cpp"]
            ],
            depends=[str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").rglob("*.h"))],
            include_dirs=[
                "csrc/include",
                "csrc/cpu",
                str(TORCH / "include"),
                str(TORCH / "include/torch/csrc/api/include"),
            ],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu"],
            language="c++",
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildBackends},
)
