# `make demo` and `make test` do all of their own set-up, in .venv and build. Nothing else is installed anywhere.
PYTHON ?= python3
# A bare `torch` would fetch gigabytes of CUDA libraries on Linux.
TORCH ?= torch==2.13.0
# The tests' own: the table of compiled kernels is this version's. PyTorch for CUDA brings the one that it needs.
TRITON ?= triton==3.7.1
# The oldest that is supported: PyTorch 2.11's. Kernels are compiled by it too.
OLDEST_TRITON ?= triton==3.6.0
# laplace-torch and what it imports, without torchvision, of which there is no CPU build to match.
LAPLACE ?= laplace-torch asdfghjkl backpack-for-pytorch curvlinops-for-pytorch einconv einops jaxtyping linear_operator \
  lightning-utilities opt_einsum torchmetrics unfoldNd wadler-lindig
SEEDS ?= 0
# Of the Python tests: processes, of one thread each but where a test asks for more.
WORKERS ?= 2
# Which tests: few by default, all with FULL=1, as CI: see CONTRIBUTING.md.
FULL ?=
export FULL
$(if $(filter-out 1,$(FULL)),$(error FULL is 1 or empty))
# Of the benchmarks: quick, full or tiny, and where results and page go.
PRESET ?= quick
OUT ?= out
# Of the paper's experiments: all, or names of some. QUICK=--quick takes minutes instead of hours.
EXPERIMENTS ?= all
QUICK ?=

# Debian and Fedora install ccache's compilers here.
export PATH := /usr/lib/ccache:/usr/lib64/ccache:$(PATH)
# Threads that wait should sleep: spinning ones made training 2.5 times slower beside another program on two cores.
export OMP_WAIT_POLICY ?= passive

VENV := .venv
BIN := $(VENV)/bin
# Resolves and unpacks in seconds where pip takes minutes. It finds the torch that pip has chosen.
UV := $(BIN)/uv pip install --quiet --find-links build/torch --python
# Without build isolation: an isolated build would fetch a second torch.
INSTALL := PARTKERNELS_BUILD=cpu $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
# partkernels_numpy, by CMake.
NUMPY := $(shell find csrc/cpu csrc/include csrc/numpy -type f) CMakeLists.txt numpy_api/pyproject.toml partkernels/arguments.py
PACKAGE := CMakeLists.txt $(wildcard cmake/* examples/cpp/CMakeLists.txt tests/csrc/*.cmake)
CPP := $(shell find csrc tests/csrc examples/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: demo federated test bench paper gpu lint unit ctest aarch64 wheel numpy docs clean always

demo: $(VENV)/demo
	$(BIN)/python examples/digits.py --seeds $(SEEDS)

# By Flower, which needs Python 3.11, in one process: three minutes.
federated: $(VENV)/federated
	$(BIN)/python examples/federated/run.py

# Set-up comes first, one thing at a time. Then two at once, so that neither processor waits while something links,
# installs or collects; each prints what it has to say when it is done.
test: $(VENV)/test $(if $(FULL),$(VENV)/docs)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint wheel numpy ctest unit $(if $(FULL),docs)

# Threads may spin here: nothing else should be running.
bench: $(VENV)/bench
	env -u OMP_WAIT_POLICY $(BIN)/python -m partbench all --preset $(PRESET) --out $(OUT)/benchmarks.json; status=$$?; \
	$(BIN)/python -m partbench report $(OUT)/benchmarks.json --out $(OUT)/benchmarks.html && exit $$status

# What is finished is kept in $(OUT)/paper: an interrupted make goes on where it was.
paper: $(VENV)/paper
	for each in $(EXPERIMENTS); do $(BIN)/python -m partbench.paper $$each $(QUICK) --out $(OUT)/paper; done

# On a machine with a GPU, in its own Python, which has PyTorch with CUDA, pytest and what [bench] names: nothing is
# installed and nothing fetched. Builds, tests, tunes and measures in ten minutes; whatever fails or hangs keeps nothing
# else from running, and $(OUT)/summary.md says how far all is: see docs/first-gpu.md.
gpu: export PYTHONPATH := .:python_api:benchmarks
gpu:
	$(PYTHON) -m partbench.gpu --out $(OUT)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python tests/imports.py
	$(BIN)/pyrefly check --summary=none --python-interpreter-path $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(CPP)

# The C++ library for CPUs, its tests, and the CUDA kernels under an emulator, all under the address sanitizer; with
# FULL=1 under that of undefined behaviour too, which takes twice as long to compile. As it ships, at -O3,
# the library is what the Python tests run.
TESTED := build/cmake$(if $(FULL),-full)/tested
comma := ,
ctest: $(TESTED)
$(TESTED): $(VENV)/test $(PACKAGE) $(CPP)
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=None \
	  -DCMAKE_CXX_FLAGS="-Og -g1 -fsanitize=address$(if $(FULL),$(comma)undefined) -fno-sanitize-recover=all" -DPARTKERNELS_CUDA=OFF \
	  -DPARTKERNELS_WITHOUT_AVX512=$(if $(shell grep -sm 1 avx512vl /proc/cpuinfo),OFF,ON)
	$(BIN)/cmake --build $(@D)
	$(BIN)/ctest --test-dir $(@D) --output-on-failure --parallel 2
	touch $@

# The same for 64-bit ARM, without sanitizers: by g++-aarch64-linux-gnu, and run by qemu-user.
ARM := /usr/aarch64-linux-gnu
aarch64: $(VENV)/test
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPARTKERNELS_CUDA=OFF \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;$(ARM)" -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/aarch64
	$(BIN)/ctest --test-dir build/aarch64 --output-on-failure --parallel 2

unit: $(VENV)/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 --durations-min 5

# The wheel in an environment that has nothing else but PyTorch, as a user gets it.
wheel: $(VENV)/test build/empty/torch
	rm -rf build/wheel build/lib*  # a wheel has every module in build/lib, also those deleted since
	PARTKERNELS_BUILD=$(or $(BUILD),cpu) $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	build/empty/bin/python -m pip install --quiet --force-reinstall --no-deps build/wheel/*.whl
	build/empty/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/empty && bin/python -m partkernels && bin/python -W error $(abspath tests/smoke.py)

# Made again with FULL=1: a dependency that an earlier wheel installed would hide that one is missing.
build/empty/torch: $(VENV)/torch-and-uv $(if $(FULL),always)
	rm -rf build/empty
	$(PYTHON) -m venv build/empty
	$(UV) build/empty/bin/python $(TORCH)
	touch $@

# partkernels_numpy's in one that has nothing but numpy, and with FULL=1 jax.
numpy: $(VENV)/test build/without-torch/numpy
	rm -rf build/numpy-wheel
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/numpy-wheel ./numpy_api
	build/without-torch/bin/python -m pip install --quiet --force-reinstall --no-deps build/numpy-wheel/*.whl
	build/without-torch/bin/python -W error tests/numpy_alone.py

build/without-torch/numpy: $(VENV)/torch-and-uv $(if $(FULL),always)
	rm -rf build/without-torch
	$(PYTHON) -m venv build/without-torch
	$(UV) build/without-torch/bin/python numpy $(if $(FULL),jax)
	touch $@

# The site, in build/docs; FULL=1 also executes the notebooks.
docs: $(VENV)/docs
	rm -rf docs/api build/docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs
	$(BIN)/python tests/site_names.py build/docs/objects.inv

clean:
	rm -rf $(VENV) build dist out docs/api partkernels/_c*.so partkernels/build_info.json *.egg-info

$(VENV)/torch-and-uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m pip download --quiet --no-deps --dest build/torch $(TORCH)
	$(UV) $(BIN)/python $(TORCH) 'setuptools>=77'
	touch $@

# $(call packages,EXTRAS): what these extras of pyproject.toml name, and the package itself, built here.
define packages
	$(UV) $(BIN)/python --requirements pyproject.toml $(addprefix --extra ,$(1)) $(2)
	$(INSTALL) .
endef

$(VENV)/demo: $(VENV)/torch-and-uv $(SOURCES)
	$(call packages,demo)
	touch $@

$(VENV)/federated: $(VENV)/torch-and-uv $(SOURCES)
	$(call packages,demo federated)
	touch $@

$(VENV)/bench: $(VENV)/torch-and-uv $(SOURCES)
	$(call packages,bench)
	touch $@

$(VENV)/paper: $(VENV)/torch-and-uv $(SOURCES)
	$(call packages,paper)
	$(UV) $(BIN)/python --no-deps $(LAPLACE)
	touch $@

$(VENV)/docs: $(VENV)/torch-and-uv $(SOURCES) $(NUMPY)
	$(call packages,docs)
	$(INSTALL) ./numpy_api
	touch $@

$(VENV)/test: $(VENV)/torch-and-uv $(SOURCES) $(NUMPY)
	$(call packages,test,$(TRITON))
	$(INSTALL) ./numpy_api
	touch $@

# Flower's simulation, with which a test of FULL=1 compares if it is there.
$(VENV)/ray: $(VENV)/test
	$(UV) $(BIN)/python 'flwr[simulation]>=1.41,<1.42'
	touch $@

build/triton-3.6: | $(VENV)/torch-and-uv
	rm -rf $@.partly
	$(UV) $(BIN)/python --no-deps --target $@.partly $(OLDEST_TRITON)
	mv $@.partly $@
