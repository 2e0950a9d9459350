# The one door to everything that is run here; `make` alone lists it.

PYTHON ?= python3
ARGS ?=
MINUTES ?= 30
PYTHONS ?= 3.12 3.13
# Whole runs first: they take longest, and a file is tested by one process.
TESTS ?= $(wildcard tests/acceptance tests/browser tests/integration tests/repository tests/unit)
# Two more than there are processors, since tests wait for half of their time.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n > 4 ? 6 : n + 2)))

VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
DASHBOARD := src/dtruntime/dashboard/static/index.html
DASHBOARD_SOURCES := $(wildcard dashboard/*.html dashboard/*.ts) $(shell find dashboard/src dashboard/public -type f)
DEPENDENCIES := pyproject.toml constraints.txt
PYTEST := $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist loadfile --no-loadscope-reorder
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check -qq install -c constraints.txt

# The tests start a thousand processes, and each would compile the source again.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-long test-pythons coverage lint bench bench-coordinator bench-http bench-data bench-checkpoints chaos proto clean dashboard dashboard-types dashboard-test browser-test docs diagrams wheel manifests deploy-check images

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run try-dashboard ## a coordinator and workers on this machine: train, kill one, recover
	@$(BIN)/strata demo $(ARGS)

test: $(VENV)/.dev $(if $(findstring browser,$(TESTS)),browser) ## unit, integration and acceptance tests; ARGS="-k barrier" goes to pytest
	@scripts/ensure-system-package.sh prometheus prometheus || echo "going on without Prometheus: its tests are skipped"
	@$(PYTEST) -m "not long" $(ARGS)

test-long: $(VENV)/.dev ## more whole trainings, kills, seeds, Slurm, Azure, packages and scripts
	@{ scripts/ensure-system-package.sh slurmctld slurm-wlm && scripts/ensure-system-package.sh munged munge; } || \
		echo "going on without Slurm: its tests are skipped"
	@$(PYTEST) -m long $(ARGS)

test-pythons: $(PYTHONS:%=test-python-%) ## unit tests on other Pythons, without PyTorch and JAX; PYTHONS="3.12 3.13"

test-python-%:
	@if ! scripts/find-python.sh $* >/dev/null; then \
		echo "NOT TESTED on Python $*: put python$* on the PATH, or install it with pyenv"; exit 0; fi; \
	$(MAKE) --no-print-directory $(VENV)-$*/.ready; \
	echo "unit tests on Python $*, without those that need PyTorch or JAX"; \
	$(VENV)-$*/bin/python -m pytest tests/unit -n $(JOBS) --dist loadfile -m "not long" -r f -p no:cacheprovider $(ARGS)

coverage: $(VENV)/.dev ## how much of each package the unit tests run
	@$(BIN)/python -m pytest tests/unit -n $(JOBS) --dist loadfile -m "not long" -r f --cov --cov-report= $(ARGS)
	@$(BIN)/python scripts/report-coverage.py .coverage

lint: $(VENV)/.dev ## style, format, types, and whether the generated code is fresh
	@echo "ruff check"; $(BIN)/ruff check --quiet .
	@echo "ruff format"; $(BIN)/ruff format --quiet --check . || \
		{ echo "not formatted: run $(BIN)/ruff format ."; exit 1; }
	@echo "mypy"; $(BIN)/mypy --no-error-summary
	@echo "generated code"; $(BIN)/python scripts/generate-proto.py --check
	@$(BIN)/python scripts/generate-dashboard-types.py --check

bench: bench-coordinator bench-http bench-data bench-checkpoints ## all benchmarks; ARGS=--quick is for each

bench-coordinator: $(VENV)/.bench ## measure the coordinator under load
	@scripts/ensure-system-package.sh h2load nghttp2-client
	@$(BIN)/python -m benchmarks.coordinator $(ARGS)

bench-http: $(VENV)/.bench ## measure heartbeats while many read the stream of events
	@scripts/ensure-system-package.sh h2load nghttp2-client
	@$(BIN)/python -m benchmarks.http_clients $(ARGS)

bench-data: $(VENV)/.bench $(PEERS)/.ready ## measure data loading beside plain reading and other libraries
	@$(BIN)/python -m benchmarks.data_loading $(ARGS)

bench-checkpoints: $(VENV)/.bench ## measure saves and loads beside the disk and other libraries
	@scripts/ensure-system-package.sh fio fio || echo "going on without fio: the benchmark writes by itself"
	@$(BIN)/python -m benchmarks.checkpoint_throughput $(ARGS)

chaos: $(VENV)/.dev ## torture tests: kills, pauses, partitions, full disks; MINUTES=30 for whole runs
	@STRATA_CHAOS_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/chaos --timeout=1800 -o faulthandler_timeout=1790 $(ARGS)

proto: $(VENV)/.dev ## regenerate src/dtruntime/rpc/gen/ from proto/coordinator.proto
	@$(BIN)/python scripts/generate-proto.py
	@echo "wrote src/dtruntime/rpc/gen/"

dashboard-types: $(VENV)/.dev ## regenerate dashboard/src/api/types.ts from the HTTP API
	@$(BIN)/python scripts/generate-dashboard-types.py
	@echo "wrote dashboard/src/api/types.ts"

dashboard: $(DASHBOARD) ## build the dashboard into the package; needs Node 20
	@echo "built src/dtruntime/dashboard/static: served by strata coordinator"

dashboard-test: dashboard/node_modules/.ready ## type check, lint and component tests of the dashboard
	@cd dashboard && npm run --silent check && npm test

browser-test: $(VENV)/.dev browser ## the dashboard in a real Chromium, with real runs behind it
	@$(BIN)/python -m pytest tests/browser -n $(JOBS) --dist loadfile $(ARGS)

# What the browser tests need. They say what is missing and are skipped where it cannot be had.
.PHONY: browser try-dashboard
browser: try-dashboard
	@scripts/ensure-system-package.sh chromium chromium || echo "going on without a browser: the dashboard is not tested"

try-dashboard:
	@if command -v npm >/dev/null && $(MAKE) --no-print-directory dashboard/node_modules/.ready; then \
		$(MAKE) --no-print-directory $(DASHBOARD); \
	else echo "going on without npm: the dashboard is not built"; fi

docs: $(VENV)/.docs ## build the documentation into build/site; fails on warnings and broken links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "built build/site: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

diagrams: $(VENV)/.docs ## draw the diagrams of the documentation that have changed; needs npm and chromium
	@$(BIN)/python scripts/generate-docs-diagrams.py

wheel: $(VENV)/.docs dashboard ## build wheel and sdist into dist/, with the dashboard inside; needs Node 20
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@ls -l dist

manifests: ## write k8s/strata.yaml, for kubectl apply -f, from k8s/Kustomization
	@scripts/ensure-system-package.sh kubectl kubectl
	@scripts/render-manifests.sh
	@echo "wrote k8s/strata.yaml"

deploy-check: $(VENV)/.deploy ## check Dockerfile, compose files and Kubernetes manifests with their own tools
	@scripts/ensure-system-package.sh docker-compose docker-compose
	@scripts/ensure-system-package.sh kubectl kubectl
	@scripts/check-deployment.sh $(BIN)

images: $(VENV)/.run deploy-check try-dashboard ## build the images and run them: five containers, one killed; Debian, as root
	@for tool in buildah mmdebstrap podman runc; do scripts/ensure-system-package.sh $$tool $$tool; done
	@scripts/images/build.sh $(BIN)/python
	@$(BIN)/python scripts/images/rehearse.py

clean: ## remove the environment, caches, build output and demo data
	@rm -rf $(VENV) $(VENV)-* .coverage build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .strata-demo benchmarks/results dashboard/node_modules src/dtruntime/dashboard/static
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean"

dashboard/node_modules/.ready: dashboard/package.json dashboard/package-lock.json
	@echo "installing the dashboard's tools"
	@cd dashboard && npm install --no-save --no-audit --no-fund --silent
	@touch $@

$(DASHBOARD): dashboard/node_modules/.ready $(DASHBOARD_SOURCES)
	@echo "building the dashboard"
	@cd dashboard && npm run --silent build
	@touch $@

# One environment for all targets. Each stamp says which set of packages is in it, and is older
# than its dependencies when they have to be installed again.

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "$(PYTHON) is not there: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Strata needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1): name another with make PYTHON=/path/to/python3"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot create a virtual environment (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.created $(DEPENDENCIES)
	@echo "installing Strata and what it needs, once: half a minute or more, depending on the network"
	@$(PIP_INSTALL) -e '.[fast]'
	@touch $@

$(VENV)/.dev: $(VENV)/.created $(DEPENDENCIES)
	@echo "installing Strata with its test and development tools"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.run $@

$(VENV)-%/.ready: $(DEPENDENCIES)
	@echo "installing Strata with its test tools for Python $*"
	@"$$(scripts/find-python.sh $*)" -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt -e '.[test-tools]'
	@touch $@

$(VENV)/.docs: $(VENV)/.created $(DEPENDENCIES)
	@echo "installing Strata with what its documentation and packages are built with"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $(VENV)/.run $@

$(VENV)/.deploy: $(VENV)/.created $(DEPENDENCIES)
	@echo "installing the tools that check Dockerfiles and manifests"
	@$(PIP_INSTALL) -e '.[deploy]'
	@touch $@

$(VENV)/.bench: $(VENV)/.created $(DEPENDENCIES)
	@echo "installing Strata with its benchmark tools"
	@$(PIP_INSTALL) -e '.[fast,zstd,bench]'
	@touch $(VENV)/.run $@

# Libraries to compare with; what they need must not meet what Strata is tested with.
$(PEERS)/.ready: scripts/install-peers.sh $(wildcard benchmarks/data_loading/peers/*.txt) constraints.txt
	@scripts/install-peers.sh $(PYTHON) $(PEERS)
