# Entry points. Each makes what it needs first; nothing has to be installed by hand.
# CLUSTER=current uses the cluster of the current kubectl context; IMAGE_PREFIX says where its images are pushed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# One thread per test process: the loop over small tensors gains nothing from more, and two cores are soon full.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo demo-down check lint test test-all proofs crds docs site images bench gpu gpu-train gpu-carry gpu-report simulate requirements

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## .venv with everything, from the hashed files in requirements/
	@hack/venv

demo: venv ## boot a cluster, install the operator, deploy a small Llama, chat with it, show what it measured
	@hack/demo

demo-down: ## undo `make demo`: no process, mount, link, rule or sysctl stays; nor images with PURGE=1
	@hack/demo-down

lint: venv ## check style, types, import layers, and that crds/, the generated pages and the table of test runs are up to date
	$(BIN)/ruff check . $(PYTHON_SCRIPTS)
	$(BIN)/ruff format --check . $(PYTHON_SCRIPTS)
	$(BIN)/mypy
	MYPYPATH=hack/cluster $(BIN)/mypy --package localcluster
	$(BIN)/lint-imports
	$(BIN)/python -m specdecode_operator.api.crd --check
	hack/ledger tables --check
	$(BIN)/python hack/docs --check

# Commands of hack/ that are Python without the suffix.
PYTHON_SCRIPTS := $(shell grep -lE '^\#!.*python' hack/* hack/cluster/* 2>/dev/null)

check: venv ## what to run before every commit: lint and the tests that need no cluster, in four minutes
	@hack/test check

test: venv ## lint, unit tests, engine core, and the core of all on a real cluster: ten minutes on two cores, caches warm
	@hack/test test

AFTER ?=
test-all: venv ## every test but the proofs, in forty minutes; AFTER=test leaves out what `make test` runs
	@hack/test $(if $(filter test,$(AFTER)),rest,all)

proofs: venv ## the slow proofs P=name,name; without P the list of them, with when each last passed
	@hack/test proofs $(P)

crds: venv ## write crds/ and the chart's copy from the pydantic models
	$(BIN)/python -m specdecode_operator.api.crd

docs: crds ## write the generated parts of docs/, and report words and broken links
	@$(BIN)/python hack/docs

site: venv ## build docs/ as a static site into build/site
	@$(BIN)/python hack/site

images: ## build both images into the local cluster's store
	@hack/cluster/images

bench: venv ## speculation against plain decoding on the embedded model, in one run
	$(BIN)/specdecode-worker bench --model embedded://smollm2-135m-instruct \
	    --draft embedded://smollm2-135m-instruct-eagle3 --concurrency 1,2,4

gpu: ## the gpu tests and benchmarks on this machine's GPU, in ten minutes, into a JSON and a page (out/); PART=1 to 3, STAGE=...
	@hack/gpu $(addprefix --part ,$(PART)) $(addprefix --stage ,$(STAGE))

gpu-train: ## train the embedded draft further on this machine's GPU, in ten minutes, and compare it with before (out/)
	@hack/gpu-train

gpu-carry: venv ## what a machine with a GPU and no network lacks, as wheels, into .gpu/
	@hack/gpu-carry

gpu-report: venv ## tables and plots of benchmarks/results/gpu-*.json
	@$(BIN)/python benchmarks/gpu/report.py

SIMULATE ?= --seeds 10 --hours 4 --jobs 2
# Stopped, it goes on where it was; runs of another operator are in a folder of their own.
SIMULATED = build/simulate-$$(git rev-parse --short HEAD:operator)-$$(git rev-parse --short HEAD:simulator)
simulate: venv ## the operator's decisions beside other systems' rules and oracles, into benchmarks/results (hours)
	@mkdir -p benchmarks/results
	$(BIN)/specdecode-simulate $(SIMULATE) --keep $(SIMULATED) --json --plot benchmarks/results > benchmarks/results/simulate.json.part
	@mv benchmarks/results/simulate.json.part benchmarks/results/simulate-$$(date -u +%F).json

simulate-record: venv ## the planner's figures of record, with trees and without, into benchmarks/results (hours); it goes on after a stop
	@hack/simulate-record $(COMMIT)

simulate-quick: venv ## the planner of this tree beside that of AGAINST (default: HEAD), in five minutes
	@hack/simulate-quick $(AGAINST)

requirements: venv ## pin the dependencies of pyproject.toml anew
	@hack/requirements
