# Each command does its own set-up. `make` alone says what there is.
# `make demo` prints to stdout what the demo does and nothing else: its recipes are silent, and set-up talks on stderr.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
CARGO ?= cargo
# Where cargo puts what it builds.
TARGET = $(or $(CARGO_TARGET_DIR),target)
PROGRAMS = -p reknit -p reknitd -p reknit-agent -p reknit-worker -p reknit-simdriver

# How long `make fuzz` tries each target.
SECONDS ?= 60

# Where `make bench-peers` puts PyTorch and torchft.
PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/reknit/peers

# Which faults `make chaos` makes, and how long it loads the machine.
SEED ?= 1
MINUTES ?= 10

# What `make soak` simulates.
SEEDS ?= 10000
START ?= 0
TRACE ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup build demo test bench bench-peers chaos fuzz soak fmt lint

help: ## Say what each command does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what the build needs and is not there yet
	@.ci/setup

build: setup ## Build all programs, optimised
	@$(CARGO) build --release --locked $(PROGRAMS) >&2

demo: build ## Watch a job lose two GPUs and take them back; ARGS="--verify --plain ..." go to `reknit demo`
	@$(TARGET)/release/reknit demo $(ARGS)

test: setup ## Check format, lints, purity and documents, then run every test and fuzz for a moment
	$(CARGO) fmt --all --check
	.ci/check-purity
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	$(CARGO) build --workspace --locked
	.ci/outside-clients
	$(CARGO) test --workspace --locked
	CARGO=$(CARGO) .ci/fuzz 10

bench: build ## Measure agent, daemon, data plane, trainer and recoveries; some minutes
	@$(CARGO) bench -p reknit-agent --locked
	@$(TARGET)/release/reknit bench daemon --resting
	@$(TARGET)/release/reknit bench daemon $(ARGS)
	@$(TARGET)/release/reknit bench plane
	@$(TARGET)/release/reknit bench train --tensor 1,2
	@$(CARGO) build -q --release --locked -p reknit-worker --example bench_step >&2
	@$(TARGET)/release/examples/bench_step orchestration
	@$(TARGET)/release/examples/bench_step checkpoints
	@$(TARGET)/release/reknit bench recovery

bench-peers: build ## Measure Reknit beside PyTorch, torchrun and torchft, which it installs (4 GB); an hour; see docs/benchmarks.md
	@tests/peers/setup "$(PEERS)"
	@$(CARGO) build --release --locked -p reknit-worker --example bench_step >&2
	@"$(PEERS)/venv/bin/python" tests/peers/bench.py --reknit $(TARGET)/release/reknit \
		--bench-step $(TARGET)/release/examples/bench_step $(ARGS)

chaos: setup ## Ten random faults in 500 steps (SEED=1), a hundred kills of the daemon, MINUTES=10 on a loaded machine
	$(CARGO) build --workspace --locked
	SEED=$(SEED) $(CARGO) test -p reknit-worker --test crew --locked -- --ignored --nocapture
	SEED=$(SEED) MINUTES=$(MINUTES) \
		$(CARGO) test -p reknit-tests --test process --locked -- --ignored --nocapture --test-threads 1

fuzz: setup ## Fuzz the readers of job, topology and holdings files, SECONDS=60 each
	CARGO=$(CARGO) .ci/fuzz $(SECONDS)

soak: setup ## Simulate the control plane under faults: SEEDS=10000 stories from START=0 on; TRACE=1 prints them
	@$(CARGO) build --release --locked -p reknit-control-sim >&2
	@SEEDS=$(SEEDS) START=$(START) TRACE=$(TRACE) $(TARGET)/release/soak

fmt: ## Format the sources
	$(CARGO) fmt --all

lint: setup ## Check lints and purity only
	.ci/check-purity
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
