# make record   the embedded study, from nothing to a committed record
# make test     lint and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMK := $(BIN)/snakemake

.PHONY: record test lint format clean

record: $(VENV)/record.stamp
	$(SMK) --cores 1 record

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -q -m alone $$(grep -l 'mark\.alone' tests/test_*.py)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check --compact-diff -l 100 Snakefile rules
	$(BIN)/python tests/lint_workflow.py

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt -l 100 Snakefile rules

$(VENV)/record.stamp: requirements.txt
	$(call venv,requirements.txt)
	touch $@

$(VENV)/test.stamp: requirements-dev.txt
	$(call venv,requirements-dev.txt)
	touch $@ $(VENV)/record.stamp

define venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moescope needs Python 3.11 or newer; give one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "the venv module is missing (Debian: apt install python3-venv)"; exit 1; }
	@# uv, of the same lock, installs the rest: three times as fast as pip
	sed -n '/^uv==/,/[^\\]$$/p' $(1) > $(VENV)/uv.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r $(1)
endef

clean:
	rm -rf $(VENV) work logs .snakemake
