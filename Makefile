# make test, demo, bench  make .venv on first use: torch, the package compiled against it, and what else they need.
# make lint, format       need no torch: ruff and clang-format, in .venv-lint.
#
# ARGS is passed on:      make test ARGS="-k relu -x"
# To choose other things: make test PYTHON=python3.12 TORCH=torch==2.13.0 VENV=.venv-2.13
# To use an environment that has everything (torch, setuptools, ninja, pytest, ...), without network:
#                         make test VENV= PYTHON=/path/to/python
# setup.py names the variables that choose what is compiled; `make clean` when they change.

PYTHON = python3
VENV = .venv
TORCH = torch
# Pinned, because another release may format differently.
LINTERS = ruff==0.17.6 clang-format==23.1.5

cpp := $(shell find csrc -name '*.[ch]*')
sources := $(cpp) $(shell find my_cuda_op -name '*.py*' -not -name '*.pyc') cuda_build.py setup.py pyproject.toml

.PHONY: test-packages venv test demo bench lint format clean install
venv: install

test: test-packages install
	"$(run)" -m pytest $(PARALLEL) $(ARGS)

demo: install
	"$(run)" examples/train_digits.py $(ARGS)

bench: install
	"$(run)" benchmarks/run.py $(ARGS)

lint: linters
	$(lint)ruff check .
	$(lint)ruff format --check .
	$(lint)clang-format --dry-run -Werror $(cpp)

format: linters
	$(lint)ruff check --fix .
	$(lint)ruff format .
	$(lint)clang-format -i $(cpp)

clean:
	rm -rf build dist *.egg-info my_cuda_op/*.so .venv*/.installed

ifeq ($(VENV),)
run := $(PYTHON)
PARALLEL = $(shell "$(run)" -c 'import xdist' 2>/dev/null && echo "-n 2")
names := pytest hypothesis expecttest numpy
lacking := from importlib.util import find_spec; m = [m for m in "$(names)".split() if not find_spec(m)]

test-packages:  # before anything is compiled
	@"$(run)" -c '$(lacking); m and exit("make test needs these packages in $(run): " + " ".join(m))'

install:
	"$(run)" -m pip install --no-build-isolation --no-deps .

.PHONY: linters
linters:
else
run := $(VENV)/bin/python
PARALLEL = -n 2
lint := $(VENV)-lint/bin/
test-packages:

install: $(VENV)/.installed
$(VENV)/.installed: $(sources)
	"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	test -x $(run) || "$(PYTHON)" -m venv $(VENV)
	"$(run)" -m pip install '$(TORCH)'  # before the package, which is compiled against it
	"$(run)" -m pip install '.[test,demo]'
	touch $@

linters: $(VENV)-lint/.installed
$(VENV)-lint/.installed: Makefile
	"$(PYTHON)" -m venv $(VENV)-lint
	$(lint)python -m pip install $(LINTERS)
	touch $@
endif
