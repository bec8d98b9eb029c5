# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What compiles one program after another keeps hardly more than one core busy; a process needs up to 3 GB.
TEST_PROCESSES ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 2 ? 2 : cores > 4 ? 4 : cores)))
IN_PROCESSES := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# for the newest JAX: a Python above the one that constraints.txt was tried with (a name on PATH may lead nowhere)
NEWER ?= $(shell for each in python3.13 python3.12 $(foreach n,13 12,$(wildcard $(HOME)/.pyenv/versions/3.$(n).*/bin/python3)); do \
	$$each -c 'import ensurepip' 2>/dev/null && echo $$each && break; done)
NEWEST ?= .venv-newest
# apart from the ordinary environment: with libtpu installed, JAX looks for a TPU whenever JAX_PLATFORMS is not set
ACCELERATORS ?= .venv-accelerators
FAST := not laws and not parity and not tools and not accelerators and not accelerators_gpu
SMOKE := tests/laws_test.py tests/api_test.py tests/stories_test.py $(addprefix tests/models/,layers_test.py products_test.py \
	t5_golden_test.py) $(addprefix tests/checkpoints/,native_test.py reading_test.py t5x_test.py) tests/runtime
export JAX_PLATFORMS ?= $(if $(wildcard /dev/nvidia0),,cpu)

PEERS := $(patsubst benchmarks/peers/environments/%.txt,.venv-peers-%/.ready,$(wildcard benchmarks/peers/environments/*.txt))

.PHONY: quickstart bench bench-peers docs test test-laws parity tools newest accelerators accelerators-gpu every-case lint format help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/'

$(BIN)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu]'
	touch $@

$(BIN)/.ready-test: $(BIN)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,test]'
	touch $@

$(BIN)/.ready-docs: $(BIN)/.ready-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(BIN)/.ready-parity: $(BIN)/.ready-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	touch $@

$(NEWEST)/.ready: pyproject.toml
	$(NEWER) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,test]'
	touch $@

$(ACCELERATORS)/.ready: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,libtpu]'
	touch $@

$(ACCELERATORS)-gpu/.ready: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,cuda12]'
	touch $@

quickstart: $(BIN)/.ready  ## set up, sweep alpha with the shipped pair, print the table and the plot's path
	$(BIN)/python -m experiments.sweep --gin_file=configs/quickstart.gin

bench: $(BIN)/.ready  ## set up and measure speed against the machine's limits, about half an hour: results/bench.json
	$(BIN)/python -m benchmarks

# one environment per library that excludes another; what can't be installed is left out with a line that says so
.venv-peers-%/.ready: benchmarks/peers/environments/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

bench-peers: $(BIN)/.ready  ## set up transformers, CTranslate2, llama.cpp (3 GB) and time the same weights in each: results/peers.json
	-$(MAKE) --no-print-directory --keep-going $(PEERS)
	$(BIN)/python -m benchmarks.peers $(ARGS)

test: $(BIN)/.ready-test  ## set up, lint, and run the tests: all but what the next three run
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -m "$(FAST)" $(IN_PROCESSES)

test-laws: $(BIN)/.ready-docs  ## the heavy part: laws by sampling, planted bugs, kills, fuzz, hostile programs; wheel, docs, notebook
	$(BIN)/python -m pytest -m "laws and not parity" $(IN_PROCESSES)

parity: $(BIN)/.ready-parity  ## compare with transformers and seqio (3 GB of extras), one device with several; and the next one
	$(BIN)/python -m pytest -rs -m "parity or tools" $(IN_PROCESSES)

tools: $(BIN)/.ready-test  ## whole runs of the benchmarks, recipes, drafters compared and served, profiles, stacks optimised, every --help; many programs in one process
	$(BIN)/python -m pytest -m tools $(IN_PROCESSES)

accelerators: $(ACCELERATORS)/.ready  ## compile every method for TPUs, on a machine without one (0.7 GB of libtpu), and hold the programs to figures
	JAX_PLATFORMS=cpu $(ACCELERATORS)/bin/python -m pytest -rs -m accelerators -n $(TEST_PROCESSES) --dist loadgroup tests/preflight

accelerators-gpu: $(ACCELERATORS)-gpu/.ready  ## the same for GPUs (5 GB), by hand
	JAX_PLATFORMS=cpu $(ACCELERATORS)-gpu/bin/python -m pytest -rs -m accelerators_gpu $(IN_PROCESSES) tests/preflight

every-case:  ## the last three with all cases of heavy tests, of which they run a sample (`pytest.mark.sample`); weekly
	SPECCASCADE_CASES=all $(MAKE) --no-print-directory --keep-going test-laws parity accelerators

newest:  ## a part of the tests with the newest JAX, on Python 3.13 or 3.12; weekly, as its releases must block no other change
	$(if $(NEWER),$(MAKE) --no-print-directory $(NEWEST)/.ready,@echo "skipped: no Python 3.12 or 3.13 here, name one as NEWER=path")
	$(if $(NEWER),$(NEWEST)/bin/python -m pytest -m "$(FAST)" $(IN_PROCESSES) $(SMOKE))

docs: $(BIN)/.ready-docs  ## the docs as a site, into build/site
	$(BIN)/mkdocs build --quiet

lint: $(BIN)/.ready-test  ## ruff, mypy, and how code and text read
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.support.plain_english

format: $(BIN)/.ready-test  ## write what is generated from Settings, and let ruff mend what it can
	$(BIN)/python -m tests.support.settings_dict
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
