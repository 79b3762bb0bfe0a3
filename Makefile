# make run [ARGS="dataset=mnist seed=1"]   install into a virtual environment if there is none, then launch
# make test [ARGS="-m slow"]               the same for the tests; JOBS is the number of test processes
# make test-lowest                         the tests with the lowest versions that pyproject.toml allows, in an environment of their own
# make test-oldest                         of what trains, the tests that assert digits, as an old processor rounds
# make results [QUICK=1] [ARGS=digits]     the runs behind RESULTS.md, then its pages; stops and goes on at any time
# make docs                                the documents as a site, build/site/index.html; fails on a dead link
# make lint, make format, make clean       VENV=<folder> and PYTHON=<interpreter> choose the environment
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
CONSTRAINTS ?=
PROSE := README.md RESULTS.md CHANGELOG.md docs examples sweeps conf immunization hydra_plugins launch.py
LOWEST := CONSTRAINTS=.ci/lowest.txt VENV=$(VENV)-lowest

# Named after the content of pyproject.toml and written last: a change or an interrupted installation installs again.
STAMP := $(VENV)/.installed-$(firstword $(shell cat pyproject.toml $(CONSTRAINTS) | cksum))

# Before the environment is made: one made with the wrong Python would stay.
CHECK_PYTHON := import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("Python 3.11 to 3.13 is needed: make PYTHON=...")

.PHONY: run test test-lowest test-oldest results docs lint format install install-docs install-lowest clean

run: install
	$(VENV)/bin/python launch.py $(ARGS)

test: install
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-lowest:
	@$(MAKE) --no-print-directory test $(LOWEST)

test-oldest: install
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal --oldest -m "trains and not slow" $(ARGS)

results: install
	QUICK=$(QUICK) PYTHON=$(abspath $(VENV))/bin/python sh sweeps/results.sh $(ARGS)

docs: install-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell
	$(VENV)/bin/codespell --config docs/prose.cfg $(PROSE)

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(STAMP)

$(STAMP):
	@echo "Installing into $(VENV) (PyTorch included: several gigabytes, some minutes the first time)"
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $(VENV)/.installed-*
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(addprefix --constraint ,$(CONSTRAINTS))
	@touch $@

install-lowest:
	@$(MAKE) --no-print-directory install $(LOWEST)

install-docs: $(STAMP)-docs

$(STAMP)-docs: $(STAMP)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
