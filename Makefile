# The two commands to know: `make demo` and `make test`. Each does its own set-up.
#
#   make PYTHON=/path/to/python3   use this interpreter (3.11 or newer) for the virtual environment
#   make TORCH_INDEX=URL           take PyTorch from this index, for example the one with its CPU builds
#   make demo ARGS='--seconds 60'  ARGS goes to `kvatlas demo`, to pytest, or to the benchmarks

SHELL = /bin/sh
PYTHON ?=
TORCH_INDEX ?=
VENV ?= $(CURDIR)/.venv
ARGS ?=
export PYTHON TORCH_INDEX VENV

.PHONY: demo demo-vllm test setup lint bench wheels test-fresh clean distclean help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@printf '%s\n' '' \
	    'demo        two engines on a recorded trace, with agent and page; demo-vllm: vLLM itself on the CPU' \
	    'test, lint  every test; what is checked without running. setup: the environment of both alone' \
	    'bench       the measured bars' \
	    'wheels      both distributions, in dist/' \
	    'test-fresh  demo and test in a bare root of this system, as root' \
	    'clean       what was built; distclean: the environment too'

demo:
	@scripts/setup.sh demo
	@"$(VENV)"/bin/kvatlas demo $(ARGS)

# vLLM itself, with a real language model on the CPU; its environment is built in the cache the first time.
demo-vllm:
	@scripts/setup.sh demo
	@scripts/demo_vllm.sh $(ARGS)

test:
	@scripts/setup.sh test
	@scripts/test.sh $(ARGS)

setup:
	@scripts/setup.sh test

lint:
	@scripts/setup.sh test
	@scripts/lint.sh

bench:
	@scripts/setup.sh test
	@"$(VENV)"/bin/python -m benchmarks $(ARGS)

# Both distributions, in dist/.
wheels:
	@scripts/setup.sh test
	@"$(VENV)"/bin/python -m build --no-isolation --outdir dist .
	@"$(VENV)"/bin/python -m build --no-isolation --outdir dist deploy/shim

# `make test` and `make demo` in a bare root of this machine's own distribution. Needs root.
test-fresh:
	@scripts/test_fresh.sh $(ARGS)

clean:
	@rm -rf build dist out htmlcov .coverage .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -path ./.venv -prune -o -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	@rm -rf "$(VENV)"
