# make test     the whole test suite, in an environment of its own (.venv), made when missing
# make quick    its part of under three minutes
# make check    ruff and mypy
# make oldest   the quick part on the oldest supported releases (.venv-oldest)
# make newest   the quick part on the newest releases of all dependencies (.venv-newest, made anew each time)
# make release TRANSFORMERS=5.20.2   the quick part on one release of transformers (.venv-release)
# make lock     renews the two locks, requirements/locked.txt and requirements/oldest.txt
# make demo     answers from a cache cut to a fifth, a small model choosing; PAIR=qwen2.5-coder for the larger pair
# make setup    only the environment
#
# All but `newest` install what a lock holds, by its hashes. torch is not in the locks: a machine with a GPU keeps its
# own torch, others get a CPU build where the package index has one. `make TORCH=torch==2.14.1 setup` asks for another.

PYTHON ?= python3
TORCH ?= $(shell cat requirements/torch.txt)
OLDEST_TORCH := torch==2.6.0
UV := uv==0.13.9

PAIR ?= smollm2

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
RELEASE := .venv-release
LOCKER := .venv-lock

.PHONY: setup test quick check oldest newest release lock demo clean

setup: $(VENV)/.done

# $(1) the environment's folder
define make_venv
	if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(1); \
	else \
		$(PYTHON) -m venv $(1); \
	fi
endef

# $(1) the environment's folder, $(2) a torch release
define install_torch
	$(1)/bin/python -c "import torch" 2>/dev/null \
		|| { ! command -v nvidia-smi >/dev/null && $(1)/bin/pip install --quiet "$(2)+cpu" 2>/dev/null; } \
		|| $(1)/bin/pip install --quiet "$(2)"
endef

# $(1) the environment's folder, $(2) a lock, $(3) a torch release
define install_locked
	$(call make_venv,$(1))
	$(1)/bin/pip install --quiet --require-hashes --no-deps --requirement $(2) \
		|| { echo "$(2) could not be installed. If it names a release that is gone, renew it: make lock" >&2; exit 1; }
	$(call install_torch,$(1),$(3))
	$(1)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(1)/.done
endef

$(VENV)/.done: pyproject.toml requirements/locked.txt requirements/torch.txt
	$(call install_locked,$(VENV),requirements/locked.txt,$(TORCH))

$(OLDEST)/.done: pyproject.toml requirements/oldest.txt
	$(call install_locked,$(OLDEST),requirements/oldest.txt,$(OLDEST_TORCH))

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

newest:
	rm -rf $(NEWEST)
	$(call make_venv,$(NEWEST))
	$(NEWEST)/bin/pip install --quiet --upgrade --editable ".[dev]"
	$(NEWEST)/bin/pip list --format=freeze | grep -iE "^(torch|transformers|accelerate|huggingface_hub|safetensors|numpy)=="
	$(NEWEST)/bin/python -m pytest -m "not slow"

$(RELEASE)/.done: pyproject.toml requirements/locked.txt requirements/torch.txt
	$(call install_locked,$(RELEASE),requirements/locked.txt,$(TORCH))

release: $(RELEASE)/.done
	$(RELEASE)/bin/pip install --quiet "transformers==$(TRANSFORMERS)"
	$(RELEASE)/bin/python -m pytest -m "not slow"

# $(1) a lock, $(2) uv's options for it
define compile_lock
	$(LOCKER)/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --extra dev --upgrade \
		--generate-hashes --no-emit-package torch --custom-compile-command "make lock" $(2) --output-file $(1)
endef

lock:
	$(PYTHON) -m venv $(LOCKER)
	$(LOCKER)/bin/pip install --quiet "$(UV)"
	$(call compile_lock,requirements/locked.txt,--constraint requirements/torch.txt)
	$(call compile_lock,requirements/oldest.txt,--resolution lowest-direct)

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(RELEASE) $(LOCKER) .pytest_cache .mypy_cache .ruff_cache
