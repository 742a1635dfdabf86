# make help lists the targets. Everything is installed into .venv, once, by whichever comes first.

PYTHON ?= python3
# `make test-oldest` says others.
VENV := .venv
CONSTRAINTS := constraints.txt
EXTRAS := dev,docs,eval,float8,opentelemetry,prometheus,qlora,sites
BIN := $(VENV)/bin
# What a run needs, and in addition what the tests, the linters and the site need.
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
PIP_INSTALL = pip install --quiet --no-compile -c $(CONSTRAINTS)
INSTALL_SELF = DS_BUILD_OPS=0 $(BIN)/python -m $(PIP_INSTALL) --no-build-isolation

# DeepSpeed compiles its CPU operators at their first use and looks for ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install install-user quickstart test test-full test-shard slow-times test-oldest check format docs docs-serve reference bench gpu-check gpu-proof gpu-roofline kernel-proof operator-proof gpu-wheels test-deps image-deps clean

help:
	@echo "make install-user  create .venv with what a run needs: EXTRAS=qlora,eval adds extras"
	@echo "make install     the same with all extras, tests and linters, by constraints.txt"
	@echo "make quickstart  tokenizer, shards, training, export, a sample: the main job on real text"
	@echo "make test        tests that take seconds;  make test-full: all of them"
	@echo "make test-shard  one shard of the slow tests, ten minutes: SHARD=3, or by the commit;  make slow-times: time them all"
	@echo "make test-oldest the tests that take seconds, with the lowest versions of pyproject.toml (6 GB)"
	@echo "make check       ruff and mypy;  make format: let ruff rewrite the files"
	@echo "make docs        build the site of docs/ into site/;  make reference: write docs/reference/ and the YAML's schema again"
	@echo "make docs-serve  the same site with search, on http://127.0.0.1:8000 (DOCS_PORT=8000)"
	@echo "make test-deps   Chromium, fish, sshd, Slurm for the tests (Debian, as root); without them some skip"
	@echo "make image-deps  buildah, debootstrap and runc for tests/cluster/test_image.py, likewise"
	@echo "make bench       run every benchmark of benchmarks/ but the GPU's"
	@echo "make gpu-check   check a GPU machine in under ten minutes, figures included"
	@echo "make gpu-proof   trace GPU steps without a GPU, in minutes"
	@echo "make gpu-roofline  price steps on an H100 kernel by kernel, without a GPU"
	@echo "make kernel-proof  run and compile Triton kernels without a GPU"
	@echo "make operator-proof  compile DeepSpeed's CUDA operators without a GPU (needs nvcc)"
	@echo "make gpu-wheels  fill .gpu-wheels/ for a GPU machine that has its own torch and no network"
	@echo "make clean       delete caches and build outputs (keeps .venv and runs/)"
	@echo "PYTHON=$(PYTHON) is the interpreter that .venv is made from (3.11 or newer)"

install: $(TOOLS)

install-user: USER_EXTRAS = $(if $(filter command line environment,$(origin EXTRAS)),$(EXTRAS))
install-user: $(STAMP)
	$(if $(USER_EXTRAS),$(INSTALL_SELF) -e '.[$(USER_EXTRAS)]')

# torch and setuptools come first: DeepSpeed is a source distribution whose build looks at torch,
# and in pip's isolated build environment that would be another torch than the one pinned.
# pip would compile all modules on one core, which takes longer than to install them. What does not
# compile are templates.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON=$(PYTHON) is not on PATH: call make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v.major}.{v.minor}; bigtrain needs 3.11 or newer: call make PYTHON=/path/to/python3.11")'
	@command -v "$${CXX:-c++}" >/dev/null || echo "warning: no C++ compiler on PATH; DeepSpeed compiles its own CPU optimizers, where a JSON asks for them" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(PIP_INSTALL) pip setuptools wheel
	$(BIN)/python -m $(PIP_INSTALL) torch ninja numpy
	$(INSTALL_SELF) -e .
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|_vendor(ed)?|transformers/models|pygments/lexers|scipy|sklearn)/' $(VENV)/lib >/dev/null || true
	@touch $@

$(TOOLS): $(STAMP)
	$(INSTALL_SELF) -e '.[$(EXTRAS)]'
	@touch $@

quickstart: $(STAMP)
	$(BIN)/python tools/quickstart.py

test test-full test-shard slow-times: export OMP_NUM_THREADS = 1
test test-full test-shard slow-times: export HF_HUB_OFFLINE = 1
test test-full test-shard slow-times: export TOKENIZERS_PARALLELISM = false

# Two files side by side: their worlds of processes wait for each other much of the time. Each test that
# is skipped is printed with its reason (tests/support/skips.py).
SIDE_BY_SIDE := -n $(or $(TEST_PROCESSES),2) --dist loadfile --no-loadscope-reorder -rs --no-fold-skipped

# More steps and more examples of the same tests too (tests/support/tiers.py).
test-full: export TEST_TIER = full

test: $(TOOLS)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

test-full: $(TOOLS)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# Successive commits take different shards (tests/support/shards.py).
SHARD ?= $(shell git rev-parse HEAD 2>/dev/null || echo 1)

test-shard: $(TOOLS)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --slow-shard $(SHARD)

# One after the other: the seconds of each are to be its own. On a quiet machine.
slow-times: $(TOOLS)
	$(BIN)/python -m pytest -m slow --slow-times

# In an environment of its own; torch's own index of CPU builds would spare it the CUDA libraries.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt EXTRAS=dev,float8,opentelemetry,prometheus,qlora,sites

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning is an error: a page outside the navigation, a link that leads nowhere.
# The variable is Material's own: without it, it advertises against MkDocs 2 at every build.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# As files the site has no search: browsers do not let a page read the index there.
DOCS_PORT ?= 8000

docs-serve: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:$(DOCS_PORT)

# What the pages of docs/reference/ say is in the code.
reference: $(TOOLS)
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/compatibility.py --output docs/compatibility.md
	$(BIN)/python -m bigtrain.cli schema --output bigtrain/settings/run_schema.json

bench: $(TOOLS)
	@set -e; for script in $(filter-out benchmarks/gpu_step.py benchmarks/flex_proof.py benchmarks/kernel_proof.py benchmarks/operator_proof.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

GPU_CHECK_MINUTES ?= 9.5
GPU_CHECK_OUTPUT ?= runs/gpu-check
GPU_CHECK = tools/gpu_check.py --minutes $(GPU_CHECK_MINUTES) --output $(GPU_CHECK_OUTPUT)

# With the machine's own torch where wheels were carried here beside the checkout, else with .venv.
gpu-check:
	@set -e; if [ ! -e $(STAMP) ] && ls .gpu-wheels/*.whl >/dev/null 2>&1; then \
	$(PYTHON) $(GPU_CHECK) $(ARGS); else $(MAKE) install EXTRAS=gpu,$(EXTRAS); \
	$(BIN)/python $(GPU_CHECK) $(ARGS); fi

gpu-proof: $(TOOLS)
	$(BIN)/python -m benchmarks.gpu_proof $(ARGS)

# Beside .venv, where transformers and torch would find them at every start.
KERNEL_PACKAGES := .kernel-packages

$(KERNEL_PACKAGES):
	$(BIN)/python -m pip install --quiet --no-deps -c $(CONSTRAINTS) --target $(KERNEL_PACKAGES) triton==3.9.0 liger-kernel

gpu-roofline: $(TOOLS) $(KERNEL_PACKAGES)
	PYTHONPATH=$(KERNEL_PACKAGES):. $(BIN)/python -m benchmarks.gpu_roofline $(ARGS)

kernel-proof: $(TOOLS) $(KERNEL_PACKAGES)
	PYTHONPATH=$(KERNEL_PACKAGES):. $(BIN)/python -m benchmarks.kernel_proof

# 1 GB of NVIDIA's packages is fetched for their headers, and nothing else of them is kept.
operator-proof: $(TOOLS)
	$(BIN)/python -m benchmarks.operator_proof --headers $(KERNEL_PACKAGES)/headers

gpu-wheels: $(TOOLS)
	$(BIN)/python tools/gpu_wheels.py

# What tests look for beside .venv: a browser, shells, a compiler, and the hosts of tests/cluster.
# .ci/run installs the packages; policy-rc.d keeps them from starting daemons here.
TEST_PACKAGES = chromium fish gcc iproute2 munge openmpi-bin openssh-server openssl pdsh slurm-client slurm-wlm-basic-plugins slurmctld slurmd util-linux zsh

test-deps:
	@missing=$$(for package in $(TEST_PACKAGES); do \
	dpkg-query -W -f='$${Status}' $$package 2>/dev/null | grep -q '^install ok installed' || echo $$package; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "test-deps: needs root and apt-get (Debian, Ubuntu) for" $$missing >&2; exit 2; }; \
	set -e; policy=/usr/sbin/policy-rc.d; \
	if [ ! -e $$policy ]; then printf '#!/bin/sh\nexit 101\n' > $$policy; chmod +x $$policy; trap "rm $$policy" EXIT; fi; \
	apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing

# What builds and runs the Dockerfile's image without Docker.
image-deps:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "image-deps: needs root and apt-get (Debian, Ubuntu)" >&2; exit 2; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah debootstrap iproute2 runc

clean:
	rm -rf build dist site .gpu-wheels *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
