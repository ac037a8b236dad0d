# make demo, make test: from a bare checkout, with Python 3.10-3.13, pip, git, make and gcc, and nothing else.
#   make test                            everything goes into .venv, once
#   make test PYTHON=/path/to/python     an environment that has the packages already: no venv, no downloads
#   make test PIP_ARGS="--index-url ..." extra arguments for pip, such as another source of packages
#   make test WORKERS=0                  one test at a time
#   make test ARGS="-k sampling -x"      extra arguments for what runs: pytest, or specstream demo

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long memcheck lint format typecheck-links clean clean-venv

ARGS ?=
PIP_ARGS ?=
VENV := .venv
STAMP := $(VENV)/installed
LOG := $(VENV)/pip.log
EXTRAS := dev,tensorboard

# Keeps this folder off sys.path (Python 3.11+): its kernels/ is no package of that name.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifdef PYTHON
PY := $(PYTHON)
setup: use-python
else
PY := $(VENV)/bin/python
setup: $(STAMP)
endif

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^#   /  /p' Makefile

demo: setup  ## answer questions over a long text with the bundled models, on the CPU
	@$(PY) -m specstream demo $(ARGS)

# Two files of tests at a time, of one thread each; one without xdist, or with a CUDA device, whose memory some fill.
AT_ONCE := import importlib.util as u, shutil; print(2 if u.find_spec("xdist") and not shutil.which("nvidia-smi") else 0)
WORKERS ?= $(shell $(PY) -c '$(AT_ONCE)')
PARALLEL = $(addprefix --dist loadfile -n ,$(filter-out 0,$(WORKERS)))

test: setup  ## run the tests, but for those marked long
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not long" $(PARALLEL) $(ARGS)

test-long: setup  ## run the tests marked long
	$(PY) -m pytest -q -m long $(ARGS)

# Some fill the device, measure it, or look at how much memory the machine has left.
ALONE := tests/gpu/test_memory.py tests/gpu/test_endings.py tests/gpu/test_measured.py
test-gpu: setup  ## run the tests that need a CUDA device, which nothing else may use
	$(PY) -m pytest -q -n 12 tests/gpu $(addprefix --ignore ,$(ALONE)) $(ARGS)
	$(PY) -m pytest -q $(ALONE) $(ARGS)

# A few shapes of the kernels' tests on a CUDA device: those that capture no graph with each tensor in memory of its own,
# so that reads and writes beyond its end show; those that do (an allocation may not be captured) in torch's pool.
SANITIZER ?= compute-sanitizer
MEMCHECK = $(SANITIZER) --tool memcheck --error-exitcode 1 --report-api-errors no $(PY) -m pytest -q
memcheck: setup  ## run the kernels' tests under compute-sanitizer: needs a CUDA device and toolkit
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK) tests/gpu/test_attention_kernels.py \
	  -k "33-80-dtype or 16-100 or dtype0-7" $(ARGS)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK) tests/gpu/test_accept_kernels.py -k "uniform" $(ARGS)
	$(MEMCHECK) tests/gpu/test_accept_kernels.py \
	  -k "4-dtype1 or (proposing and 1-) or (settings and 96 and dtype0)" $(ARGS)

lint: setup  ## ruff, mypy, and the links that mypy needs
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) .typecheck/links.py --check
	$(PY) -m mypy

format: setup  ## sort imports and format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

typecheck-links: setup  ## bring .typecheck/ up to date with the folders
	$(PY) .typecheck/links.py

clean:  ## remove what tools leave behind, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

clean-venv:  ## remove .venv
	rm -rf $(VENV)

# The first of these that is new enough and not too new.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10 python
SUITABLE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

$(VENV)/bin/python:
	@for python in $(PYTHONS); do \
	  if $$python -c '$(SUITABLE)' 2>/dev/null; then \
	    echo "Creating $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "No Python from 3.10 to 3.13 found; name one of an environment to use: make ... PYTHON=/path" >&2; exit 1

# Runs $(1), a pip command; prints the lines that tell of progress; on failure ends with pip's own error.
define run_pip
	@{ $(1) --log $(LOG) 2>&1; echo "status $$?"; } | awk \
	  '/^ *Downloading .* MB\)/ { name = $$2; sub(/.*\//, "", name); print "  downloading", name, $$(NF - 1), $$NF } \
	   /^Installing collected/ { n = split($$0, all, ","); if (n > 1) print "  installing", n, "packages" } \
	   /^ERROR|^error|No space left/ { print } \
	   /^status / { code = $$2 } { fflush() } \
	   END { if (code) print "pip failed; the whole log is in $(LOG)"; exit code }'
endef

$(STAMP): $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (the first time: torch and about 80 packages)"
	$(call run_pip,$(PY) -m pip install $(PIP_ARGS) -c constraints.txt "pip>=23.1" setuptools)
	$(call run_pip,$(PY) -m pip install $(PIP_ARGS) -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]")
	@touch $(STAMP)

# Installed from this very folder? Asked from elsewhere, for here Python would find the folder itself.
HERE := import importlib.util as u, os, sys; s = u.find_spec("specstream"); \
	sys.exit(not (s and s.origin and os.path.samefile(s.origin, sys.argv[1] + "/specstream/__init__.py")))

.PHONY: use-python
use-python:
	@$(PY) -c '$(SUITABLE)' || { echo "$(PY): Python 3.10 to 3.13 is needed" >&2; exit 1; }
	@(cd / && $(PY) -c '$(HERE)' "$(CURDIR)") 2>/dev/null || { \
	  echo "Installing specstream, and nothing else, into the environment of $(PY)"; \
	  $(PY) -m pip install -q --no-build-isolation --no-deps -e .; }
