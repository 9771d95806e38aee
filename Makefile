# `make` alone lists the targets. Every target that needs the environment makes it first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# For `make gpu` on a machine whose own python already has torch: make gpu PY=python3
PY     ?= $(BIN)/python
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo docs wheels release test test-all sanitize lint format gpu bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## make .venv with the versions of constraints.txt

# The stamp is what keeps a second `make test` from installing again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	touch $@

demo: install  ## plan and run a small convolutional net against eager; report in build/demo
	$(BIN)/hocket run digits-cnn --report build/demo

docs: install  ## the site in build/site, strictly: a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# A core is for one version of torch and of Python and is named after both; other versions compile theirs on first use.
wheels: install  ## a wheel in dist with the C++ cores for this torch and this Python, which needs no compiler
	$(BIN)/python -c 'from hocket.native.build import prebuild; from hocket.planning.partition import compiled; print(prebuild()); print(compiled.prebuild())'
	$(BIN)/python -m pip wheel -qq --no-deps -w dist --config-settings=--build-option=--plat-name=linux_$$(uname -m) .

# The notes are the version's part of the changelog, without which nothing is made.
release: install  ## the tests, sdist and wheel in dist, and a tag with the notes of this version in CHANGELOG.md
	version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); mkdir -p build; \
	awk -v begin="## [$$version]" 'index($$0, "## [") == 1 { on = index($$0, begin) == 1 } on' CHANGELOG.md > build/notes.md; \
	test -s build/notes.md || { echo "CHANGELOG.md has no heading for $$version"; exit 1; }; \
	test -z "$$(git status --porcelain)" || { echo "there are changes that are not committed"; exit 1; }; \
	$(MAKE) lint test wheels && \
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' && \
	git tag -a "v$$version" -F build/notes.md && echo "v$$version is tagged; dist has what to upload"

# One thread for each of the processes: two of two threads each would wait for each other. What needs more asks for it.
# Bytecode is kept, whatever the environment says: tests start hundreds of interpreters.
# Tests stay in their order (worksteal), so that those of a file share what is made once for all of them.
test: install  ## the tests, without the slow ones; under ten minutes on two cores
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu"

test-all: install  ## all tests; those that need a GPU skip themselves where there is none
	$(BIN)/python -m pytest -n $(JOBS)

# Python itself was not built with a sanitizer, so its library has to be loaded first. Python's own leaks are not ours,
# and threads of libraries that were not built with ThreadSanitizer are none of its business. That one knows no threads of
# forked processes, and takes a minute for each convolution.
SANITIZED := OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/build/sanitized PYTHONPATH=tests
PRELOADED = LD_PRELOAD="$$(for name in $(1) libstdc++.so; do g++ -print-file-name=$$name; done | paste -sd:)"
CORE_TESTS := -p support.sanitized -m "not slow and not gpu" tests/native tests/execution tests/pystate/test_guard_table.py
sanitize: install  ## the tests of the C++ cores under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	for one in address thread; do $(SANITIZED) $(BIN)/python -m support.sanitized $$one || exit 1; done
	$(call PRELOADED,libasan.so libubsan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(SANITIZED) $(BIN)/python -m pytest $(CORE_TESTS) tests/planning/partition/test_search.py
	$(call PRELOADED,libtsan.so) \
	TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$(CURDIR)/tests/support/thread_sanitizer.supp" \
	$(SANITIZED) $(BIN)/python -m pytest --sanitizer thread $(CORE_TESTS) \
		--ignore=tests/execution/test_processes.py --ignore=tests/native/test_winograd.py

lint: install  ## format, lint, types, and who may import whom
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## format in place, and mend what ruff can mend
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

# With another PY nothing is installed: the sources are read from src and benchmarks. Under nine minutes: 150 s for the
# tests, 360 s for all benches together, which write what they measured and name what they had no time for. The benches
# run even if a test fails; the status is that of both. Warnings of another torch's CUDA build fail no test.
gpu: $(if $(filter $(BIN)/python,$(PY)),install)  ## tests and benches on a GPU, results in benchmarks/results/gpu.json; PY=python3 for a python that has torch
	failed=0; export PYTHONPATH=src:.; \
	timeout --kill-after=10 150 $(PY) -m pytest -W default tests/gpu || failed=$$?; \
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(PY) -m benchmarks gpu --budget-s 360 -o benchmarks/results/gpu.json || failed=$$?; \
	else echo "no GPU: nothing is measured"; fi; \
	exit $$failed

bench: install  ## planned against eager, side by side, on this machine
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks concurrency --quick
	$(BIN)/python -m benchmarks manycore --quick

clean:  ## remove what was built and cached; .venv stays
	rm -rf build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
