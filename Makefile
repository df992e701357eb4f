# Each target first installs what it needs into .venv. The installation runs again only if pyproject.toml, the
# constraints or the installer have changed.

PYTHON ?= python3
BIN := .venv/bin
EXTRA := $(if $(shell command -v nvidia-smi),gpu,cpu)
TO_TRAIN := .venv/.installed-$(EXTRA)
STAMP := .venv/.installed-$(EXTRA)-dev
# Fails for a broken link, but not with --quiet. NO_MKDOCS_2_WARNING silences an advertisement for another program.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=loadfile

# Containers often set this variable. Each process would then compile all of asyncrl and of the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test unit check docs constraints mutations processors campaign bench

train: $(TO_TRAIN)
	$(BIN)/asyncrl up -c configs/quickstart.yaml $(ARGS)

# Leaves out the tests of `make campaign`. Two workers, each of which runs one test file at a time. The files run in the order of their names, which puts the long
# ones into the middle, so that both workers have work until the end. The tests start hundreds of processes, which would each compile asyncrl
# where PYTHONDONTWRITEBYTECODE is set.
test: $(STAMP)
	$(BIN)/python -m compileall -q asyncrl
	$(PYTEST) --numprocesses=2 --no-loadscope-reorder -m "not campaign" $(ARGS)

# Takes half a minute. Leaves out tests that start real processes, train, or import a large library.
unit: $(STAMP)
	$(PYTEST) --numprocesses=2 --hypothesis-profile=quick -m "not integration and not slow and not campaign" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config .importlinter
	$(BIN)/python -m asyncrl.config.docs --check
	$(BIN)/python -m asyncrl.metrics.docs --check
	$(BIN)/python dashboards/build.py --check
	$(BIN)/python docs/faults.py --check
	$(SITE)
	$(BIN)/python -m pytest -q tests/test_security.py

# Breaks the loss and the advantages on purpose in many ways, one at a time. Each break must make a test fail. Takes
# minutes.
mutations: $(STAMP)
	$(BIN)/python tests/algorithms/run_mutations.py $(ARGS)

# Runs the tests that compare computed numbers with settings that change the order of sums. Takes about five minutes for
# each setting.
processors: $(STAMP)
	$(BIN)/python tests/run_processors.py $(ARGS)

# Runs before a release, and not in CI: the two targets above, the report in Chromium, random datasets, and real runs
# whose processes are killed or frozen at random moments. Takes about three hours. Adds the killed runs to
# benchmarks/crash_campaign.jsonl.
campaign: mutations processors
	$(PYTEST) -m campaign
	$(BIN)/python benchmarks/data_campaign.py
	$(BIN)/python benchmarks/pool_campaign.py
	$(BIN)/python benchmarks/crash_campaign.py run

# Measures how fast runs are, and writes the tables in docs/benchmarks.md. The machine must have no other work. The first
# call makes an environment for TRL.
bench: $(STAMP)
	$(BIN)/python benchmarks/overlap.py --write
	$(BIN)/python benchmarks/block_sizes.py --write
	$(BIN)/python benchmarks/profile_run.py --write
	$(BIN)/python benchmarks/coordinator.py --write
	$(BIN)/python benchmarks/against_trl.py --seeds 0 1 2

# Writes the generated pages and dashboards, and then the site. Open site/index.html in a browser.
docs: $(STAMP)
	$(BIN)/python -m asyncrl.config.docs
	$(BIN)/python -m asyncrl.metrics.docs
	$(BIN)/python dashboards/build.py
	$(BIN)/python docs/faults.py
	$(SITE)

# Writes constraints-cpu.txt and constraints-gpu.txt from pyproject.toml.
constraints: $(STAMP)
	$(BIN)/python deploy/constraints.py $(ARGS)

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
