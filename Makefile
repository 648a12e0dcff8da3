# make demo   train and compare ensembles on embedded data; prints a table, writes featureflock-demo/
# make test   linters, types and tests, in less than ten minutes with set-up; make coverage also tries the slow benchmarks,
#             and says which lines tests reach
# make bench  speed and memory, as ratios measured side by side, in minutes; FULL=1 for the large settings; writes bench.json
# Each sets itself up in .venv first.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test coverage bench clean

demo: $(READY)
	$(BIN)/featureflock demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

coverage: $(READY)
	$(PYTEST) --cov=featureflock --cov-report=term-missing:skip-covered

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(if $(FULL),--full) --json bench.json

clean:
	rm -rf .venv featureflock-demo bench.json

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('featureflock needs Python 3.11 or newer; run make PYTHON=...')"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)
