"""Build the C++ and CUDA backends through PyTorch's stable ABI and record the results in build_info.json.

PARTKERNELS_BUILD unset  builds all that works, CUDA if there is a GPU; `python -m partkernels` lists missing backends
PARTKERNELS_BUILD=cpu    builds the C++ backend only; fails without a working compiler
PARTKERNELS_BUILD=cuda   builds both backends or fails; no GPU is needed
PARTKERNELS_BUILD=none   builds nothing

TORCH_CUDA_ARCH_LIST     the compute capabilities of the CUDA backend, as for PyTorch's own extensions
"""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path
from threading import Lock

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

try:
    import torch
except ModuleNotFoundError:
    sys.exit("partkernels is built with the installed PyTorch; install torch first: pip install 'torch>=2.10'")

ROOT = Path(__file__).parent
TORCH = Path(torch.__file__).parent
ASKED = os.environ.get("PARTKERNELS_BUILD", "")
if ASKED not in ("", "cpu", "cuda", "none"):
    raise ValueError(f"PARTKERNELS_BUILD={ASKED} is not a known backend; pass cpu, cuda or none.")

# The oldest PyTorch with a stable ABI that has every function that the binding calls (parallel_for) is 2.10.
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
# Python's default flags include -fwrapv, which hinders the optimiser: with it, products took 1.3 to 1.6 times as long.
FLAGS += ["-fno-wrapv"]
# Without this, sqrt has to set errno, and loops that call it are not vectorised.
FLAGS += ["-fno-math-errno"]


def binding(backend: str) -> list[Path]:
    """Return the sources of a backend's PyTorch operators: the shared ones and the backend's."""
    return [path for folder in (".", backend) for path in sorted((ROOT / "csrc" / "torch" / folder).glob("*.cpp"))]


def binding_headers(backend: str) -> list[str]:
    """Return the include directories of the binding; each backend's folder has its backend.h."""
    return ["csrc/include", f"csrc/torch/{backend}", "csrc/torch", str(TORCH / "include")]


SOURCES = [*sorted((ROOT / "csrc" / "cpu").glob("*.cpp")), *binding("cpu")]
HEADERS = sorted((ROOT / "csrc").rglob("*.h"))
# Code for 8.0 runs on all of 8.x, and its PTX on GPUs newer than 9.0. wgmma needs 9.0a.
ARCHITECTURES = os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0+PTX 9.0a"


def compiler() -> list[str]:
    """Return the C++ compiler's command, such as ["ccache", "g++"] for CXX="ccache g++"; empty if not found."""
    given = shlex.split(os.environ.get("CXX", ""))
    usual = [shlex.split(sysconfig.get_config_var("CXX") or "c++"), ["g++"], ["c++"]]
    return next((command for command in ([given] if given else usual) if shutil.which(command[0])), [])


def compiler_version() -> str:
    """Return the first line of the C++ compiler's --version; empty if there is no compiler."""
    found = compiler()
    if not found:
        return ""
    said = subprocess.run([*found, "--version"], capture_output=True, text=True).stdout
    return said.partition("\n")[0] or shlex.join(found)


def nvcc() -> str | None:
    """Return the path of nvcc, in CUDA_HOME if it is set, otherwise on PATH; None if not found."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)


def architectures() -> list[tuple[int, bool]]:
    """Parse ARCHITECTURES into pairs: the number, such as 80 for 8.0, and whether to include PTX."""
    found = []
    for name in ARCHITECTURES.replace(";", " ").split():
        number, plus, ptx = name.partition("+")
        major, dot, minor = number.removesuffix("a").partition(".")
        if not (dot and major.isdecimal() and minor.isdecimal() and (ptx == "PTX" if plus else True)):
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {name}; pass compute capabilities, such as '8.0+PTX 9.0a'.")
        if int(major) < 8:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {name}; the CUDA backend needs 8.0 or newer.")
        found.append((10 * int(major) + int(minor), bool(ptx)))
    return found


def check_cuda() -> None:
    """Raise if nvcc is missing or TORCH_CUDA_ARCH_LIST is invalid."""
    if nvcc() is None:
        raise RuntimeError("there is no nvcc; install the CUDA toolkit or set CUDA_HOME to its folder")
    architectures()


def code(architecture: int, ptx: bool = False) -> list[str]:
    """Return nvcc's options for machine code of an architecture, and for PTX if asked."""
    name = "90a" if architecture == 90 else str(architecture)
    both = [f"-gencode=arch=compute_{name},code=sm_{name}"]
    return both + [f"-gencode=arch=compute_{name},code=compute_{name}"] * ptx


def make_if_older(object: Path, command: list[str], compile: Callable[[], str | None]) -> None:
    """Compile an object unless it is newer than all sources and was made by the same command.

    So an installation and a wheel of the same sources share objects. The compiler's output is saved beside each
    object: nvcc reports each kernel's registers, spills and shared memory.
    """
    report = object.with_suffix(".txt")
    header = " ".join(command) + "\n"
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    if report.exists() and report.stat().st_mtime > newest and report.read_text().startswith(header):
        return
    said = compile()
    report.write_text(header + (said or ""))


def run(command: list[str]) -> str:
    """Return a command's output; raise RuntimeError with that output if the command fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


class BuildBackends(build_ext):
    """Build a shared library for torch.ops.load_library, with build_info.json beside it."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        return extension.export_symbols  # it is not a Python module and has no PyInit function

    def finalize_options(self):
        super().finalize_options()
        self.include_dirs = []  # no source includes Python's headers, whose folder differs between environments

    def build_extensions(self):
        compile, compile_one = self.compiler.compile, self.compiler._compile

        def compile_together(sources, include_dirs, **options):
            """Compile on all processors: each instruction set is a file that takes half a minute."""
            done = count(1)

            def compile_source(source):
                is_kernel = source.startswith(os.path.join("csrc", "cpu"))  # needs no torch
                objects = compile([source], include_dirs=["csrc/include"] if is_kernel else include_dirs, **options)
                print(f"[{next(done)}/{len(sources)}] {source}\n", end="", flush=True)
                return objects

            with ThreadPoolExecutor(os.cpu_count()) as threads:
                return [*chain(*threads.map(compile_source, sources))]

        def compile_if_older(object, *rest):
            options = [str(each) for given in rest for each in ([given] if isinstance(given, str) else given)]
            make_if_older(Path(object), [*self.compiler.compiler_so_cxx, *options], lambda: compile_one(object, *rest))

        self.compiler.compile, self.compiler._compile = compile_together, compile_if_older
        super().build_extensions()

    def run(self):
        if self.editable_mode:  # a wheel reuses these objects; setuptools would delete the folder
            self.build_temp = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        if ASKED == "cuda":
            check_cuda()  # before anything is compiled
        facts = {"torch": torch.__version__, "flags": " ".join(FLAGS), "compiler": compiler_version()}
        facts["sources"] = runpy.run_path(str(ROOT / "partkernels" / "build_info.py"))["digest"](ROOT / "csrc")
        folders = [Path(self.build_lib)] + ([ROOT] if self.inplace else [])
        library, lock = folders[-1] / "partkernels" / "_cuda.so", Lock()

        def record(backend: str, said: str) -> None:
            """Write the facts as soon as they are known, so that an interrupted build keeps finished backends."""
            with lock:
                facts[backend] = said
                for folder in folders:
                    (folder / "partkernels").mkdir(parents=True, exist_ok=True)
                    (folder / "partkernels" / "build_info.json").write_text(json.dumps(facts, indent=1) + "\n")

        # Both backends build in parallel: with many processors, each takes as long as its slowest file.
        with ThreadPoolExecutor(1) as pool:
            cuda = pool.submit(lambda: record("cuda", self.build_cuda(library)))
            record("cpu", self.build_cpu(facts["compiler"]))
            cuda.result()
        if not facts["cuda"].startswith("built"):
            library.unlink(missing_ok=True)

    def build_cpu(self, compiler: str) -> str:
        """Build the C++ backend; return 'built', or why it was not built and how to fix it."""
        if ASKED == "none":
            return "not built: PARTKERNELS_BUILD=none; reinstall partkernels without it"
        try:
            if not compiler:
                given = os.environ.get("CXX")
                cure = f"CXX is {given!r}; set it to one" if given else "install one (on Debian: apt install g++)"
                raise RuntimeError(f"there is no C++ compiler; {cure}")
            super().run()
        except Exception as error:
            if ASKED:
                raise
            problem = f"not built: {error}; then reinstall partkernels with PARTKERNELS_BUILD=cpu"
            self.warn(problem)
            return problem
        return "built"

    def build_cuda(self, library: Path) -> str:
        """Build the CUDA backend; return 'built for ...', or why it was not built and how to fix it."""
        cure = "reinstall partkernels with PARTKERNELS_BUILD=cuda"
        if ASKED in ("cpu", "none"):
            return f"not built: PARTKERNELS_BUILD={ASKED}; {cure}"
        if not ASKED and torch.version.cuda is None:
            return f"not built: this PyTorch has no CUDA support; install one that has, or {cure}"
        if not ASKED and not torch.cuda.is_available():
            return f"not built: there is no GPU, and the build takes minutes; to build it anyway, {cure}"
        try:
            check_cuda()
            self.compile_cuda(library)
        except Exception as error:
            if ASKED:
                raise
            self.warn(f"not built: {error}; then {cure}")
            return f"not built: {error}; then {cure}"
        return "built for " + ", ".join(
            option
            for number, ptx in architectures()
            for option in [f"sm_{number}{'a' * (number == 90)}"] + [f"PTX {number}"] * ptx
        )

    def compile_cuda(self, library: Path) -> None:
        """Compile csrc/cuda and the binding, files in parallel, and link them with CUDA's static runtime."""
        asked = dict(architectures())
        objects = Path(self.build_temp) / "cuda"
        objects.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        common = [
            "-std=c++20",
            "-O3",
            "-Xptxas",
            "-v",
            "-Icsrc/include",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
            "-c",
        ]
        common += [] if 90 in asked else ["-DPARTKERNELS_WITHOUT_HOPPER"]
        # Without USE_CUDA, PyTorch's headers do not declare their stream functions.
        options = [*FLAGS, *(f"-I{folder}" for folder in binding_headers("cuda")), "-DUSE_CUDA", "-fPIC", "-c"]
        commands = [
            [*compiler(), *options, str(source.relative_to(ROOT)), "-o", str(objects / f"binding_{source.stem}.o")]
            for source in binding("cuda")
        ]
        sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
        sources.sort(key=lambda source: source.stem != "hopper_linear")  # takes longest, so it starts first
        for source in sources:
            # These files use instructions that only 9.0a has.
            is_hopper = source.stem.startswith("hopper")
            if is_hopper and 90 not in asked:
                continue
            codes = code(90) if is_hopper else [option for each in asked.items() for option in code(*each)]
            commands.append(
                [nvcc(), *codes, *common, str(source.relative_to(ROOT)), "-o", str(objects / f"{source.stem}.o")]
            )
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda command: make_if_older(Path(command[-1]), command, lambda: run(command)), commands))
        linked = [command[-1] for command in commands]
        runtime = ["-cudart", "static", "-L" + str(TORCH / "lib"), "-ltorch_cpu", "-Xlinker", "--exclude-libs,ALL"]
        subprocess.run([nvcc(), "-shared", *linked, *runtime, "-o", str(library)], cwd=ROOT, check=True)


class BuildCuda(BuildBackends):
    """Build only the CUDA backend, to inspect its code."""

    def run(self):
        check_cuda()
        self.compile_cuda(Path(self.build_temp) / "_cuda.so")


class AnyPythonWheel(bdist_wheel):
    """Tag the wheel for a platform, or any without a library, not for a Python version: the library does not use it."""

    def get_tag(self):
        return "py3", "none", "any" if ASKED == "none" else super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "partkernels._cpu",
            sources=[str(path.relative_to(ROOT)) for path in SOURCES],
            depends=[str(path.relative_to(ROOT)) for path in HEADERS],
            include_dirs=[*binding_headers("cpu"), "csrc/cpu"],
            library_dirs=[str(TORCH / "lib")],
            libraries=["torch_cpu"],
            language="c++",
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildBackends, "build_cuda": BuildCuda, "bdist_wheel": AnyPythonWheel},
)
