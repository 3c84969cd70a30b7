# Every target sets up .venv by itself; all it needs is python3 (3.11 or later) with pip, and make.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
NPROC ?= 2
FRAMEWORKS := .venv-frameworks
STAND_IN := .venv-stand-in

.PHONY: demo test test-frameworks test-stand-in lint bench peer docs clean

# torch first, and alone: with the constraint it is the tested one, and the open range in pyproject.toml is then already
# satisfied when the rest is installed.
$(READY): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/digits.py

test: $(READY)
	$(PY) tests/shards.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy src

bench: $(READY)
	mkdir -p benchmarks/out
	set -e; for script in $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(PY) $$script --quick --json benchmarks/out/$$(basename $$script .py).json; done

peer: $(READY)
	$(PY) tests/peer/run.py

# The frameworks bring half a hundred packages: an environment of their own keeps ours small. torch first, as above.
$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt -e '.[frameworks]' pytest pytest-timeout
	touch $@

test-frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m pytest -o addopts="-ra --strict-markers --import-mode=importlib" tests/frameworks

# Those for a GPU, where there is none: torch's CUDA build on a stand-in for CUDA (tests/gpu/stand_in/README.md).
$(STAND_IN)/.ready:
	test -x $(STAND_IN)/bin/python || $(PYTHON) -m venv $(STAND_IN)
	$(STAND_IN)/bin/python -m pip install --quiet "torch==2.11.0" "nvidia-cuda-crt<14" numpy expecttest pytest pytest-timeout hypothesis
	touch $@

test-stand-in: $(STAND_IN)/.ready
	$(STAND_IN)/bin/python tests/gpu/stand_in/run.py --values --devices 2 tests/gpu/run_all.py --beside 2
	$(STAND_IN)/bin/python tests/gpu/stand_in/run.py --values --races --devices 2 tests/gpu/test_streams.py

docs: $(READY)
	$(PY) tests/docs_check.py

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(STAND_IN) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
