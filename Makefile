# Everything a newcomer needs; each target sets up its own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

SEED ?= $(shell date +%s)
SCALE ?= 20

.PHONY: help demo test test-oldest chaos lint format docs results package clean

help:
	@echo "make demo    train CE and ISDA on the bundled digits and compare them: a minute"
	@echo "make test    ruff, mypy and the whole test suite"
	@echo "make chaos   damage files and kill processes at random; SEED and SCALE repeat or lengthen it"
	@echo "make test-oldest  the library's tests with the oldest torch that is supported"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  let ruff format the sources"
	@echo "make docs    build the documentation into site/"
	@echo "make results update the tables and figures of README and docs from results/"
	@echo "make package build wheel and sdist, install and try each in an empty environment"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[experiments,integrations,dev]'
	touch $@

demo: $(VENV)/installed
	@echo "Cross entropy and ISDA on the bundled digits, ResNet-8, ten seeds, about a minute on two cores."
	@echo "Ten training images per class, because with all of them cross entropy has less than 1 % error"
	@echo "and the difference is that of a few images. Every seed draws its own training images; all"
	@echo "others are test images. Dropout 0.3, 25 epochs, lambda_0 = 1. Batches of 10, so that no batch"
	@echo "is smaller than the others: batch norm on a few images would harm cross entropy."
	$(BIN)/isda compare --images-per-class 10 --batch-size 10 --epochs 25 --drop-rate 0.3 --lambda-0 1 \
		--seeds 0 1 2 3 4 5 6 7 8 9 --device cpu --processes 2 --out runs/demo --resume

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint $(VENV)/docs
	$(BIN)/python -m pytest -n 2 --dist loadfile -q
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q tests/triton_kernels

chaos: $(VENV)/installed
	ISDA_CHAOS_SEED=$(SEED) ISDA_CHAOS_SCALE=$(SCALE) $(BIN)/python -m pytest -q -s tests/chaos

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

results: $(VENV)/installed
	$(BIN)/isda report --runs results --figures docs/figures \
		--costs results/benchmarks/cost_cifar100_h200.csv results/benchmarks/cost_imagenet_h200.csv \
		--pictures docs/figures/neighbours_cifar10 \
		--update README.md docs/index.md docs/results.md docs/choosing.md docs/generators.md

# the oldest torch that is supported, and the oldest whose torch.compile is
OLDEST := torch==2.6.0
OLDEST_COMPILED := torch==2.9.0

define test_with  # torch and tests
	$(PYTHON) -m venv --clear build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check '$(1)' numpy \
		pytest hypothesis
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	build/oldest/bin/python -m pytest -q -p no:cacheprovider $(2)
endef

test-oldest:
	$(call test_with,$(OLDEST),tests/library)
	$(call test_with,$(OLDEST_COMPILED),tests/library tests/distributed)

package: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	set -e; for file in dist/*.whl dist/*.tar.gz; do \
		$(PYTHON) -m venv --clear build/empty; \
		build/empty/bin/python -m pip install --quiet --disable-pip-version-check \
			-c constraints.txt "$$file" mypy; \
		tests/package/smoke.sh "$(CURDIR)/build/empty/bin"; \
	done

clean:
	rm -rf $(VENV) site build dist *.egg-info src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
