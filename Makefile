# Each target first installs what it needs into .venv. The installation runs again only if pyproject.toml, the
# constraints or the installer have changed. `make help` prints the texts behind ##.

PYTHON ?= python3
BIN := .venv/bin
EXTRA := $(if $(shell command -v nvidia-smi),gpu,cpu)
TO_TRAIN := .venv/.installed-$(EXTRA)
STAMP := .venv/.installed-$(EXTRA)-dev
CAMPAIGN := .venv/.installed-$(EXTRA)-campaign
# Neither the unit tests nor the checks need vLLM: a new environment gets none until another target needs it.
LIGHT := $(if $(wildcard $(TO_TRAIN) $(STAMP)),$(STAMP),.venv/.installed-light)
# Fails for a broken link, but not with --quiet. NO_MKDOCS_2_WARNING silences an advertisement for another program.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=loadfile

# Containers often set this variable. Each process would then compile all of asyncrl and of the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train test durations unit check docs wheel images version constraints mutations processors campaign bench
.DEFAULT_GOAL := help

help: ## prints this list
	@echo 'make TARGET [ARGS="..."]    ARGS are passed on to the command of the target'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

install: $(STAMP) ## installs everything for development into .venv; the other targets do this where they need it

train: $(TO_TRAIN) ## installs asyncrl into .venv, and trains the quickstart on this machine: 3 to 5 minutes
	$(BIN)/asyncrl up -c configs/quickstart.yaml $(ARGS)

# Three workers, each of which runs one test file at a time: on two cores, one often waits for processes that it started.
# The files run in the order of their names, which puts the long ones into the middle, so that all workers have work until
# the end.
test: $(STAMP) ## runs the whole test suite: 15 to 29 minutes on two CPU cores
	$(PYTEST) --numprocesses=3 --no-loadscope-reorder -m "not campaign" $(ARGS)

durations: ## runs the whole test suite, and writes the seconds of each file to tests/durations.csv
	$(MAKE) test ARGS="--junitxml=.venv/results.xml"
	$(BIN)/python tests/run_durations.py .venv/results.xml

unit: $(LIGHT) ## runs the tests that start no real process and train nothing: 4 minutes on 2 CPU cores
	$(PYTEST) --numprocesses=2 --hypothesis-profile=quick -m "not integration and not slow and not campaign" $(ARGS)

check: $(LIGHT) ## checks format, types, layers, generated pages and dashboards, and builds the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config .importlinter
	$(BIN)/python .ci/house
	$(BIN)/python -m asyncrl.config.docs --check
	$(BIN)/python -m asyncrl.metrics.docs --check
	$(BIN)/python -m asyncrl.algorithms.docs --check
	$(BIN)/python -m asyncrl.views.health_docs --check
	$(BIN)/python dashboards/build.py --check
	$(BIN)/python docs/faults.py --check
	$(SITE)
	$(BIN)/python -m pytest -q -m "not campaign" tests/test_security.py tests/campaign

mutations: $(STAMP) ## breaks loss and advantages in many ways; each break must make a test fail: minutes
	$(BIN)/python tests/algorithms/run_mutations.py $(ARGS)

processors: $(STAMP) ## runs the tests of numbers with settings that change the order of sums: 5 minutes each
	$(BIN)/python tests/run_processors.py $(ARGS)

# The killed runs are added to benchmarks/crash_campaign.jsonl. The planted faults are in tests/campaign/faults.jsonl.
campaign: mutations processors $(CAMPAIGN) ## runs weekly and before a release: these two, long runs, random data, planted faults, killed runs: 5 hours
	$(PYTEST) -m campaign
	$(BIN)/python tests/campaign/run_faults.py
	$(BIN)/python tests/campaign/run_healthy.py
	$(BIN)/python benchmarks/data_campaign.py
	$(BIN)/python benchmarks/pool_campaign.py
	$(BIN)/python benchmarks/crash_campaign.py run

# The machine must have no other work. The first call makes an environment for TRL.
bench: $(STAMP) ## measures how fast runs are, and writes the tables in docs/benchmarks.md
	$(BIN)/python benchmarks/overlap.py --write
	$(BIN)/python benchmarks/block_sizes.py --write
	$(BIN)/python benchmarks/profile_run.py --write
	$(BIN)/python benchmarks/coordinator.py --write
	$(BIN)/python benchmarks/against_trl.py --seeds 0 1 2

docs: $(LIGHT) ## writes the generated pages and dashboards, and the site: open site/index.html in a browser
	$(BIN)/python -m asyncrl.config.docs
	$(BIN)/python -m asyncrl.metrics.docs
	$(BIN)/python -m asyncrl.algorithms.docs
	$(BIN)/python -m asyncrl.views.health_docs
	$(BIN)/python dashboards/build.py
	$(BIN)/python docs/faults.py
	$(SITE)

# Needs Python and the network, and not .venv. Files that an earlier build has left would become a part of the wheel.
wheel: ## builds the wheel into dist/
	rm -rf build
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

IMAGE ?= asyncrl
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
images: ## builds the images of deploy/docker for CPUs and for CUDA; IMAGE is their name
	docker build --file deploy/docker/Dockerfile --target cpu --tag $(IMAGE):$(VERSION)-cpu .
	docker build --file deploy/docker/Dockerfile --target gpu --tag $(IMAGE):$(VERSION)-gpu .

version: ## prints the version of pyproject.toml
	@echo $(VERSION)

constraints: $(STAMP) ## writes constraints-cpu.txt and constraints-gpu.txt from pyproject.toml
	$(BIN)/python deploy/constraints.py $(ARGS)

.venv/.installed-light: pyproject.toml constraints-cpu.txt deploy/install.py
	@echo "installing into .venv without vLLM: this takes one to five minutes and 3 to 4 GB, and is needed once"
	$(PYTHON) deploy/install.py --extra light --also docs,lint,test
	@touch $@

$(TO_TRAIN): pyproject.toml constraints-$(EXTRA).txt deploy/install.py
	@echo "installing into .venv: this takes one to ten minutes and 5 to 10 GB, and is needed once"
	@rm -f .venv/.installed-*
	$(PYTHON) deploy/install.py --extra $(EXTRA) --also hf
	@touch $@

$(STAMP): pyproject.toml constraints-$(EXTRA).txt deploy/install.py
	@echo "installing into .venv: this takes one to ten minutes and 5 to 10 GB, and is needed once"
	@rm -f .venv/.installed-*
	$(PYTHON) deploy/install.py --extra $(EXTRA) --also dev
	@touch $@ $(TO_TRAIN)

# With the S3 server, whose packages take 100 MB.
$(CAMPAIGN): $(STAMP)
	$(PYTHON) deploy/install.py --extra $(EXTRA) --also dev,campaign
	@touch $@
