# `make demo` and `make test` need nothing but make and Python 3.11 or newer: each makes its own environment.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all notebooks docs test-aot test-aot-all compile-kernels test-device lint format bench clean

help:
	@echo "make demo     install into $(VENV) and run the demo: hide facts in a long text, shrink the cache, ask"
	@echo "make test     install into $(VENV), check the style, run the tests"
	@echo "make test-all     the slow tests too"
	@echo "make test-aot     install compilers for TPU and GPU into $(VENV)-aot, compile every kernel for chips that aren't here"
	@echo "make test-aot-all at every size"
	@echo "make notebooks  run the notebooks and the documentation's code with a tiny model"
	@echo "make docs     build the documentation into site/, strictly"
	@echo "make test-device  the tests that need a TPU or GPU"
	@echo "make lint | format | bench | clean"
	@echo "Settings: PYTHON=$(PYTHON)  VENV=$(VENV)  PYTEST_ARGS='-k cache'"

demo: $(VENV)/.package
	@echo "==> kvec demo"
	@$(BIN)/kvec demo

test: lint
	@echo "==> Tests"
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

test-all: lint
	@echo "==> All tests that need no accelerator"
	@$(BIN)/python -m pytest -m "not device and not aot_tpu and not aot_gpu" $(PYTEST_ARGS)

notebooks: $(VENV)/.test
	@echo "==> Notebooks and the documentation's code"
	@$(BIN)/python -m pytest -n 2 -m notebook tests/test_documents.py $(PYTEST_ARGS)

docs: $(VENV)/.made pyproject.toml
	@echo "==> Documentation"
	@$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, warnings wouldn't count

# In an environment of its own: where the compilers are installed, JAX looks for their chips, and complains.
test-aot: AOT_TESTS = (aot_tpu or aot_gpu) and not slow
test-aot-all: AOT_TESTS = aot_tpu or aot_gpu
test-aot test-aot-all:
	@$(MAKE) --no-print-directory VENV=$(VENV)-aot AOT_TESTS="$(AOT_TESTS)" compile-kernels

compile-kernels: $(VENV)/.compilers
	@echo "==> Kernels, compiled for $$(cat $(VENV)/.compilers)"
	@KVEC_MUST_COMPILE="$$(cat $(VENV)/.compilers)" XLA_FLAGS= \
		$(BIN)/python -m pytest -n 2 -m "$(AOT_TESTS)" tests/pallas $(PYTEST_ARGS)

test-device: $(VENV)/.test
	@echo "==> Tests on the accelerator that JAX finds"
	@JAX_PLATFORMS= $(BIN)/python -m pytest -m device $(PYTEST_ARGS)

lint: $(VENV)/.test
	@$(BIN)/python -c "import sys, jax; print('==> Python', sys.version.split()[0], 'with JAX', jax.__version__)"
	@echo "==> Style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.package
	@$(BIN)/python -m benchmarks.generate

clean:
	rm -rf $(VENV) $(VENV)-aot site .pytest_cache .ruff_cache build dist

# The environment. A stamp file says what is installed; a change of pyproject.toml installs again.

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvec_jax needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=/path/to/python")'
	@echo "==> Making the environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.package: $(VENV)/.made pyproject.toml
	@echo "==> Installing kvec_jax into $(VENV) (about 350 MB the first time)"
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	@echo "==> Installing kvec_jax and its test tools into $(VENV) (about 350 MB the first time)"
	@$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@ $(VENV)/.package

# The stamp says which chips there are compilers for: TPUs always; an NVIDIA GPU where JAX's plugin and the two pieces of
# CUDA that its compiler reads (libdevice, ptxas) can be had. The rest of CUDA isn't needed.
$(VENV)/.compilers: $(VENV)/.test
	@echo "==> Installing the compilers for TPU and GPU into $(VENV) (about 900 MB the first time)"
	@$(BIN)/python -m pip install --quiet --editable ".[tpu]"
	@version=$$($(BIN)/python -c "import jax; print(jax.__version__)"); \
	if $(BIN)/python -m pip install --quiet --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" \
	    "nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*"; then echo v5e v5p v6e h100 > $@; \
	else echo "==> No compiler for NVIDIA GPUs here: those kernels go uncompiled"; echo v5e v5p v6e > $@; fi
