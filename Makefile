# Each target sets itself up; `make` alone lists them.

# The Python to build environments with, e.g. PYTHON=python3.12; by default the first one that is new enough.
PYTHON ?=
# Extras for `make train`, e.g. EXTRAS=cuda or EXTRAS=tpu.
EXTRAS ?=
# Further flags, for `make train` and for `make test`.
ARGS ?=
PYTEST_ARGS ?=
# Test processes, about 5 GB each. Most of a test is compiling, which keeps one core busy.
WORKERS ?= 2
# Further flags for pip, e.g. an index with CPU builds of torch for `make interop`.
PIP_ARGS ?=

VENV := .venv
VENV_INTEROP := .venv-interop
comma := ,
empty :=
space := $(empty) $(empty)

# Nothing is printed by a candidate that is missing, too old, or unable to make an environment.
is_new_enough := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
candidates := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python)

# $(call install,folder,extras): the package with its extras in an environment of its own, and a stamp.
# A folder where an install was cut short may hold half a package that pip takes for a whole one: start over.
define install
@set -e; \
if [ -e $(1)/.installing ] || ! $(1)/bin/python -c '$(is_new_enough)' 2>/dev/null; then \
  python=; \
  for candidate in $(candidates); do \
    if "$$candidate" -c '$(is_new_enough)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
  done; \
  if [ -z "$$python" ]; then \
    echo "No usable Python: looked for Python 3.11 or newer with the venv module among: $(candidates)." >&2; \
    echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv) or name it:" >&2; \
    echo "  make $(MAKECMDGOALS) PYTHON=path/to/python3" >&2; \
    exit 1; \
  fi; \
  echo "Making $(1) with $$("$$python" --version)"; \
  rm -rf $(1); mkdir $(1); touch $(1)/.installing; \
  "$$python" -m venv $(1); \
fi; \
touch $(1)/.installing; \
echo "Installing into $(1) (a minute or two)"; \
$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.$(if $(2),[$(2)])'; \
touch $@; \
rm $(1)/.installing
endef

# An environment whose install was cut short, or whose Python has gone, is out of date whatever its stamps say.
stale = $(shell test ! -e $(1)/.installing && $(1)/bin/python -c '' 2>/dev/null || echo FORCE)

STAMP_TRAIN := $(VENV)/.installed$(if $(EXTRAS),-$(subst $(comma),-,$(subst $(space),,$(EXTRAS))))
STAMP_TEST := $(VENV)/.installed-test
STAMP_INTEROP := $(VENV_INTEROP)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test lint interop clean FORCE

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

train: $(STAMP_TRAIN)  ## fine-tune a small model with QLoRA; ARGS= passes flags, EXTRAS=cuda uses a GPU
	$(VENV)/bin/python -m qjax.io.embedded
	$(VENV)/bin/python -m experiments.train --config=configs/qlora.py $(ARGS)

test: lint  ## lint, check types and run the tests; PYTEST_ARGS= passes flags, WORKERS= sets processes
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP_TEST)  ## ruff and mypy only
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy

interop: $(STAMP_INTEROP)  ## compare with torch, transformers and peft, in an environment of their own
	$(VENV_INTEROP)/bin/python -m pytest $(PYTEST_ARGS) interop/

clean:  ## remove the environments and everything that tools cache here
	rm -rf $(VENV) $(VENV_INTEROP) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP_TRAIN): setup.cfg pyproject.toml $(call stale,$(VENV))
	$(call install,$(VENV),$(EXTRAS))

$(STAMP_TEST): setup.cfg pyproject.toml $(call stale,$(VENV))
	$(call install,$(VENV),test$(comma)report)

$(STAMP_INTEROP): setup.cfg pyproject.toml $(call stale,$(VENV_INTEROP))
	$(call install,$(VENV_INTEROP),test$(comma)interop)

FORCE:
