# make test     the whole test suite, in an environment of its own (.venv), made when missing
# make quick    its part of under three minutes
# make check    ruff and mypy
# make oldest   the quick part on the oldest transformers that is supported (.venv-oldest)
# make demo     answers from a cache cut to a fifth, a small model choosing; PAIR=qwen2.5-coder for the larger pair
# make setup    only the environment
#
# Where a GPU is found, its own torch is used as it is; elsewhere a CPU build is taken if the package
# index has one. `make TORCH=torch==2.9.1 setup` asks for another.

PYTHON ?= python3
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS := 5.17.0

PAIR ?= smollm2

VENV := .venv
OLDEST := .venv-oldest

.PHONY: setup test quick check oldest demo clean

setup: $(VENV)/.done

# $(1) the folder of an environment, $(2) what is installed besides the package
define make_environment
	if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(1); \
	else \
		$(PYTHON) -m venv $(1); \
	fi
	$(1)/bin/python -c "import torch" 2>/dev/null \
		|| { ! command -v nvidia-smi >/dev/null && $(1)/bin/pip install --quiet "$(TORCH)+cpu" 2>/dev/null; } \
		|| $(1)/bin/pip install --quiet "$(TORCH)"
	$(1)/bin/pip install --quiet --editable ".[dev]" $(2)
	touch $(1)/.done
endef

$(VENV)/.done: pyproject.toml
	$(call make_environment,$(VENV),)

$(OLDEST)/.done: pyproject.toml
	$(call make_environment,$(OLDEST),"transformers==$(OLDEST_TRANSFORMERS)")

test: $(VENV)/.done
	$(VENV)/bin/python -m pytest

quick: $(VENV)/.done
	$(VENV)/bin/python -m pytest -m "not slow"

demo: $(VENV)/.done
	$(VENV)/bin/python examples/demo.py --pair $(PAIR)

check: $(VENV)/.done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

oldest: $(OLDEST)/.done
	$(OLDEST)/bin/python -m pytest -m "not slow"

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache
