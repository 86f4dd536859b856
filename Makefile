# `make` or `make help` lists what can be done. Everything runs in .venv, which set-up fills once and again when
# pyproject.toml or constraints.txt changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.flyball-installed
# Two workers, each with whole files: tests of one file share servers.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow proof sanitize avx512 arm e2e-prepare e2e compat clients lock wheel check format chart clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv, install Flyball in it, build the CPU kernels (the others do this by themselves)

demo: $(STAMP) ## serve examples/demo.yaml on this machine, send it traffic, tune it live, drain it (about a minute)
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## run the tests (a few minutes)
	@$(PYTEST)

test-slow: $(STAMP) ## run the slow tests: long property tests, fuzzing, soaks (CI runs them too; SLOW='tests/simulation' for some)
	@$(PYTEST) -m "slow and not gpu" --durations=20 $(SLOW)

proof: $(STAMP) ## run the tuner against an oracle in simulation, write docs/tuning-proof.md (two hours; PROOF='--full' and others)
	@$(BIN)/python -m flyball_simulation.proof $(PROOF)

sanitize: $(STAMP) ## run the kernel tests on C++ ops compiled with AddressSanitizer and UBSan (SANITIZE=--emulate-avx512: AMX's on any CPU with AVX2)
	@PYTHONPATH=tests $(BIN)/python -m sanitize $(SANITIZE)

avx512: $(STAMP) ## run the kernel tests on C++ ops compiled for AVX-512, its instructions emulated where the CPU lacks them (AVX512=x86-64-v4 for some)
	@PYTHONPATH=tests $(BIN)/python -m avx512 $(AVX512)

arm: $(STAMP) ## run the kernel tests on C++ ops compiled for Arm, under QEMU (Debian packages, or it says which; ARM=armv8-a for some)
	@PYTHONPATH=tests $(BIN)/python -m arm $(ARM)

e2e-prepare: $(STAMP) ## build Kubernetes, containerd, CoreDNS, Helm, KEDA and the images for the tests (they do this by themselves)
	@PYTHONPATH=tests $(BIN)/python -m e2e_kit.prepare

e2e: $(STAMP) ## run the tests on a whole Kubernetes node: root and Debian packages, or it says which (E2E='--full' for all rounds)
	@PYTHONPATH=tests $(BIN)/python -m e2e_kit $(E2E)

compat: ## run the tests with the oldest and with the newest versions that pyproject.toml allows (needs uv)
	uv venv --quiet --clear --python 3.13 $(VENV)-oldest
	uv pip install --quiet --python $(VENV)-oldest --resolution lowest-direct --editable '.[dev]'
	$(VENV)-oldest/bin/python -m pytest -q
	uv venv --quiet --clear --python 3.12 $(VENV)-newest
	uv pip install --quiet --python $(VENV)-newest --upgrade --editable '.[dev]'
	$(VENV)-newest/bin/python -m pytest -q

clients: $(STAMP) ## run outside clients against a server of the demo model, each in an environment of its own (CLIENTS='litellm')
	@PYTHONPATH=tests $(BIN)/python -m clients_kit $(CLIENTS)

lock: $(STAMP) ## write constraints.txt: the newest versions, for set-up, CI and the images (run the tests afterwards)
	@$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report - '.[dev]' \
		| $(BIN)/python docker/constraints.py > $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

wheel: $(STAMP) ## build dist/flyball-VERSION-py3-none-any.whl
	@rm -rf build # setuptools puts all that it finds there into the wheel, also files that are no longer in the packages
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

check: $(STAMP) ## run the formatter's check, the linter, the type checker and the layer contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## format the code and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chart: $(STAMP) ## copy the CRD into the chart, write its dashboard and golden files anew
	PYTHONPATH=tests $(BIN)/python -m chart_kit.goldens

clean: ## remove .venv and caches
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis out

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Flyball needs Python 3.11 or newer. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, mostly torch's download)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@# setuptools warns of editable installs, at length, to no use here
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m flyball_kernels.cpu.build
	@touch $(STAMP)
