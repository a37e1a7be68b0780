# Every target creates .venv and installs the pinned dependencies when they are missing.
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SEED ?= 0
RUNS ?= runs/demo
ROUNDS ?= 10
BENCH ?= runs/bench
GROWTH ?= runs/growth
export MPLBACKEND := Agg

.DEFAULT_GOAL := help
.PHONY: help install demo bench bench-gpu bench-simulators growth attack tables test test-fast test-slow lint types tests coverage docs format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | awk -F '\t' '{printf "  make %-16s %s\n", $$1, $$2}'

# torch is installed by its exact version first, so that no resolver picks another. Whether that is the CPU or the CUDA
# build is decided by the package index that pip is set up with.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(BIN)/.installed  ## create .venv with the pinned dependencies

demo: $(BIN)/.installed  ## train FedAvg and FOT on real digits, side by side; print one table, draw the curves
	@# The engine is fixed, so that figures do not depend on a trial's outcome.
	@$(BIN)/cfl sweep --methods fedavg,fot --seeds $(SEED)-$(SEED) --jobs 2 --out $(RUNS) --pictures \
		--schedule.cohort_width 10 --engine.kind workers --engine.stack 5

bench: $(BIN)/.installed  ## measure speed and memory into runs/bench: WORKS=W1,W2 ROUNDS=10 ENGINES=loop,cfl
	@PYTHONPATH=tests $(BIN)/python -m benchmarks --works "$(WORKS)" --engines "$(ENGINES)" --rounds "$(ROUNDS)" --out "$(BENCH)"

WORKS_ON_GPU := W1,W2,W3,W9
WORKS_BESIDE := W1,W2,W3
BESIDE := loop,cfl,cfl-2-processes,flower,pfl-research,fedjax

bench-gpu: $(BIN)/.installed  ## the same on a GPU, some five minutes, into runs/bench-gpu: WORKS=W1,W2 ROUNDS=10
	@PYTHONPATH=tests $(BIN)/python -m benchmarks --device gpu --works "$(or $(WORKS),$(WORKS_ON_GPU))" --engines "$(ENGINES)" \
		--rounds "$(ROUNDS)" --out "$(BENCH)-gpu"

bench-simulators: $(BIN)/.installed  ## the same beside Flower, pfl-research and FedJAX, which are installed into runs/bench/environments: WORKS=W1,W2
	@PYTHONPATH=tests $(BIN)/python -m benchmarks --works "$(or $(WORKS),$(WORKS_BESIDE))" \
		--engines "$(or $(ENGINES),$(BESIDE))" --rounds "$(ROUNDS)" --out "$(BENCH)"

growth: $(BIN)/.installed  ## measure what must not grow with clients, tasks, network or processes, into runs/growth: ONLY=clients,tasks
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.growth --lines "$(ONLY)" --out "$(GROWTH)"

ATTACK ?= runs/attack

attack: $(BIN)/.installed  ## attack the command line, half an hour, into runs/attack: KILLS=300 CONFIGS=1000 CORRUPTIONS=200 FAULTS=300 SEED=0 ONLY=kills/17-FOT
	@OMP_NUM_THREADS=1 PYTHONHASHSEED=0 PYTHONPATH=tests $(BIN)/python -m attack --seed $(SEED) --out "$(ATTACK)" \
		$(call option,--kills,$(KILLS)) $(call option,--configurations,$(CONFIGS)) \
		$(call option,--corruptions,$(CORRUPTIONS)) $(call option,--faults,$(FAULTS)) $(call option,--only,$(ONLY))

# fot-table1, fot-figure4, ...: a target for every table's file; docs/tables.md explains the variables.
TABLES := $(foreach file,$(filter-out %/paper.yaml,$(wildcard cfl/papers/*/*.yaml)),$(subst /,-,$(file:cfl/papers/%.yaml=%)))
SCALE ?= paper
JOBS ?= 1
TABLE_RUNS ?= runs/tables
.PHONY: $(TABLES)

tables: $(BIN)/.installed  ## list the papers' tables; make fot-table1 BENCH=pmnist METHODS=fot,fedavg PARTITION=iid SCALE=short SEEDS=3 JOBS=1
	@$(BIN)/python -m cfl.papers list

# A misspelt name would otherwise be nobody's, and the whole published protocol would begin.
TABLE_VARIABLES := BENCH METHODS PARTITION ONLY SCALE SEEDS JOBS TABLE_RUNS DRY_RUN VENV PYTHON
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
UNKNOWN := $(sort $(filter-out $(TABLE_VARIABLES),$(GIVEN)))
ifneq ($(and $(UNKNOWN),$(filter $(TABLES),$(MAKECMDGOALS))),)
$(error no variable of $(firstword $(filter $(TABLES),$(MAKECMDGOALS))): $(UNKNOWN); valid: $(TABLE_VARIABLES))
endif

# An option with its value as one word of the shell, whatever is in it; nothing where there is no value.
option = $(if $(strip $(2)),$(1) '$(subst ','\'',$(strip $(2)))')

# BENCH has a default that belongs to the target bench: here it counts only if it was given.
$(TABLES): $(BIN)/.installed
	@$(BIN)/python -m cfl.papers run $@ $(call option,--scale,$(SCALE)) $(call option,--jobs,$(JOBS)) \
		$(call option,--runs,$(TABLE_RUNS)) $(call option,--seeds,$(SEEDS)) \
		$(if $(filter-out file,$(origin BENCH)),$(call option,--bench,$(BENCH))) $(call option,--methods,$(METHODS)) \
		$(call option,--partition,$(PARTITION)) $(call option,--only,$(ONLY)) \
		$(if $(filter-out 0 false no,$(DRY_RUN)),--dry-run)

test: lint types tests  ## run lint, types and the tests that are not slow

lint: $(BIN)/.installed  ## check style, format and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(BIN)/.installed  ## check types
	$(BIN)/mypy

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

tests: $(BIN)/.installed  ## run the tests that are not slow
	$(PYTEST) -m "not slow" --durations=10

test-fast: $(BIN)/.installed  ## run the quickest tests, for daily work
	$(PYTEST) -m "not slow and not medium"

test-slow: $(BIN)/.installed  ## run the slow tests: attacks, processes, whole runs, long equivalences
	$(PYTEST) -m slow --durations=20

coverage: $(BIN)/.installed  ## run the test suite and report line coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --cov=cfl --cov-report=term

docs: $(BIN)/.installed  ## build the documentation into docs/_build
	$(BIN)/python -m sphinx -W -b html docs docs/_build

format: $(BIN)/.installed  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
