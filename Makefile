# Needs python3 (3.11 or newer) with venv, and make. Everything is put into .venv/ and build/; `make clean` removes both.
# Every package is pinned by SHA-256 in requirements/; PYTHON=... chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := build/models/SmolLM2-135M-Instruct
PREFIX ?= /opt/lethe
DESTDIR ?=
PIP_INSTALL := install -qq --disable-pip-version-check --require-hashes --no-deps
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 20
FUZZ_TARGETS := json envelope manifest table catalog header safetensors
BENCH := build/bench-venv
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv model demo test coverage fuzz lint bench wheel lock install-owner install-node install-units clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1: \2/p' Makefile

venv: $(VENV)/.stamp-lethe ## make .venv with everything for the demo and the tests

$(VENV)/.stamp-pip: requirements/pip.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lethe needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	@touch $@

$(VENV)/.stamp-dev: requirements/dev.txt $(VENV)/.stamp-pip
	$(BIN)/python -m pip $(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

# A wheel that this machine offers to pip (PIP_FIND_LINKS) goes before the download: with a CPU build there, gigabytes are
# spared. The public Linux build does not load without the CUDA libraries; a CPU build does.
define INSTALL_TORCH
	$(1)/python -m pip $(PIP_INSTALL) --no-index -r requirements/torch.txt 2>/dev/null \
		|| $(1)/python -m pip $(PIP_INSTALL) -r requirements/torch.txt
	$(1)/python -c 'import torch' 2>/dev/null || $(1)/python -m pip $(PIP_INSTALL) -r requirements/torch-cuda.txt
	$(1)/python -c 'import torch'
endef

$(VENV)/.stamp-torch: requirements/torch.txt requirements/torch-cuda.txt $(VENV)/.stamp-dev
	$(call INSTALL_TORCH,$(BIN))
	@touch $@

$(VENV)/.stamp-lethe: pyproject.toml $(VENV)/.stamp-torch
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-index --no-build-isolation --editable .
	@touch $@

model: $(MODEL)/.stamp ## fetch and convert the model of the demo and the tests

$(MODEL)/.stamp: demo/fetch_model.py demo/convert_gguf.py $(VENV)/.stamp-lethe
	$(BIN)/python demo/fetch_model.py
	@touch $@

demo: venv model ## run the main job on this machine, from packing to the wipe
	$(BIN)/python demo/run.py

test: venv model ## run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

coverage: ## run every test and print the coverage
	$(MAKE) test PYTEST_ARGS='--cov --cov-report=term $(PYTEST_ARGS)'

fuzz: build/fuzz/venv/.stamp ## fuzz every parser, guided by coverage, FUZZ_SECONDS each (20)
	for target in $(FUZZ_TARGETS); do \
		build/fuzz/venv/bin/python -m tests.fuzz.run $$target --seconds $(FUZZ_SECONDS) > build/fuzz/$$target.log 2>&1 \
			|| { tail -40 build/fuzz/$$target.log; exit 1; }; tail -1 build/fuzz/$$target.log; done

build/fuzz/venv/.stamp: requirements/pip.txt requirements/fuzz.txt
	$(PYTHON) -m venv build/fuzz/venv
	build/fuzz/venv/bin/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	build/fuzz/venv/bin/python -m pip $(PIP_INSTALL) -r requirements/fuzz.txt
	@touch $@

lint: venv ## formatting, lint, types, and which package may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv model $(BENCH)/.stamp ## the benchmarks of benchmarks/, one after the other; the loaders of others go into build/bench-venv
	for program in benchmarks/*.py; do case $$program in \
		benchmarks/sealed_load.py|benchmarks/load_model.py) continue ;; esac; \
		echo "== $$program"; $(BIN)/python $$program || exit 1; done
	$(BENCH)/bin/python -m benchmarks.sealed_load $(BENCH_ARGS)
	$(BIN)/python benchmarks/load_model.py

$(BENCH)/.stamp: requirements/pip.txt requirements/bench.txt requirements/torch.txt requirements/torch-cuda.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	$(BENCH)/bin/python -m pip $(PIP_INSTALL) -r requirements/bench.txt
	$(call INSTALL_TORCH,$(BENCH)/bin)
	@touch $@

wheel: build/tools/.stamp ## build the wheel into build/dist
	rm -rf build/dist
	build/tools/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --no-index --no-build-isolation \
		--wheel-dir build/dist .

build/tools/.stamp: requirements/pip.txt requirements/build.txt
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	build/tools/bin/python -m pip $(PIP_INSTALL) -r requirements/build.txt
	@touch $@

lock: build/tools/.stamp ## write requirements/*.txt again; UPGRADE=--upgrade takes newer versions
	UV=build/tools/bin/uv UPGRADE=$(UPGRADE) requirements/lock.sh

install-owner: wheel ## install lethe-owner into PREFIX (/opt/lethe): no torch, 45 MB in all
	$(PYTHON) -m venv $(PREFIX)
	$(PREFIX)/bin/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	$(PREFIX)/bin/python -m pip $(PIP_INSTALL) -r requirements/owner.txt
	$(PREFIX)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-index --force-reinstall build/dist/lethe-*.whl

install-node: wheel ## install lethe and lethe-owner into PREFIX (/opt/lethe), with torch
	$(PYTHON) -m venv $(PREFIX)
	$(PREFIX)/bin/python -m pip $(PIP_INSTALL) -r requirements/pip.txt
	$(PREFIX)/bin/python -m pip $(PIP_INSTALL) -r requirements/node.txt
	$(call INSTALL_TORCH,$(PREFIX)/bin)
	$(PREFIX)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-index --force-reinstall build/dist/lethe-*.whl
	mkdir -p $(PREFIX)/share/doc/lethe
	cp -r README.md LICENSE docs systemd $(PREFIX)/share/doc/lethe/

install-units: ## put the systemd units for PREFIX into DESTDIR/etc
	install -d $(DESTDIR)/etc/systemd/system $(DESTDIR)/etc/sysusers.d $(DESTDIR)/etc/tmpfiles.d
	for unit in lethe-agent.service lethe.target; do \
		sed 's|/opt/lethe/|$(PREFIX)/|' systemd/$$unit > $(DESTDIR)/etc/systemd/system/$$unit; done
	install -m 644 systemd/sysusers.d/lethe.conf $(DESTDIR)/etc/sysusers.d/lethe.conf
	install -m 644 systemd/tmpfiles.d/lethe.conf $(DESTDIR)/etc/tmpfiles.d/lethe.conf

clean: ## remove .venv and build
	rm -rf $(VENV) build
