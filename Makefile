# make demo       train and compare five methods on built-in data; prints a table and writes featureflock-demo/report.html
# make test       linters, types and all tests, in less than six minutes on two cores including set-up
# make test-unit  unit tests only, in less than 90 seconds
# make test-integrations   installs Lightning, transformers, accelerate and others, and runs the tests that need them
# make coverage   all tests including slow benchmarks, and the lines that no test reaches
# make docs       the documentation site, in site/; nothing is downloaded once .venv exists
# make fuzz       random damage to files and random arguments for eight minutes; counts what was tried, in fuzz.json
# make bench      speed and memory as ratios measured side by side, in minutes; FULL=1 for large networks, PEERS=1 to install
#                 TorchEnsemble and TorchUncertainty and compare with them; writes bench.json
# Each target creates .venv first.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
INTEGRATIONS := .venv/integrations
PEER_LIBRARIES := .venv/peers

SITE := "import sysconfig; print(sysconfig.get_path('purelib'))"
PYTEST := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-unit test-integrations coverage docs fuzz bench clean

demo: $(READY)
	$(BIN)/featureflock demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not integrations" --durations=15

test-unit: $(READY)
	$(PYTEST) tests/unit --durations=15

test-integrations: $(INTEGRATIONS) $(PEER_LIBRARIES)/ready
	$(PYTEST) tests/integrations --durations=15
	$(PEER_LIBRARIES)/bin/python -m pytest tests/integrations/test_peers.py --durations=5

coverage: $(READY)
	$(PYTEST) --cov=featureflock --cov-report=term-missing:skip-covered

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(READY)
	cd tests && ../$(BIN)/python -m fuzz --minutes $(or $(MINUTES),8) --json ../fuzz.json

bench: $(READY) $(if $(PEERS),$(PEER_LIBRARIES)/ready)
	$(BIN)/python benchmarks/bench.py $(if $(FULL),--full) --json bench.json

clean:
	rm -rf .venv featureflock-demo bench.json fuzz.json site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('featureflock needs Python 3.11 or newer; run make PYTHON=...')"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

$(INTEGRATIONS): $(READY)
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[integrations]"
	touch $(INTEGRATIONS)

# Other ensemble libraries need torchvision, whose wheel may not import beside a CPU build of PyTorch; Lightning would fail
# with it. They have an environment of their own, on top of .venv.
$(PEER_LIBRARIES)/ready: $(READY)
	$(BIN)/python -m venv --clear $(PEER_LIBRARIES)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" > "$$($(PEER_LIBRARIES)/bin/python -c $(SITE))/base.pth"
	$(PEER_LIBRARIES)/bin/pip install --disable-pip-version-check --quiet -c constraints.txt "featureflock[peers]"
	touch $(PEER_LIBRARIES)/ready
