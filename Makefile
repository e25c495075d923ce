# Entry points. Each makes what it needs first; nothing has to be installed by hand.
# CLUSTER=current uses the cluster of the current kubectl context; IMAGE_PREFIX says where its images are pushed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# One thread per test process: the loop over small tensors gains nothing from more, and two cores are soon full.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo demo-down check lint test faults extra-node network-policies operator-faults crds images bench gpu gpu-train gpu-carry gpu-report simulate loop router drafts outages lossless soak fuzz crd-fuzz requirements

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## .venv with everything, from the hashed files in requirements/
	@hack/venv

demo: venv ## boot a cluster, install the operator, deploy a small Llama, chat with it, show what it measured
	@hack/demo

demo-down: ## undo `make demo`: no process, mount, link, rule or sysctl stays
	@hack/demo-down

lint: venv ## check style, types, import layers, wording, and that crds/ and docs/api.md match the models
	$(BIN)/ruff check . $(PYTHON_SCRIPTS)
	$(BIN)/ruff format --check . $(PYTHON_SCRIPTS)
	$(BIN)/mypy
	MYPYPATH=hack/cluster $(BIN)/mypy --package localcluster
	$(BIN)/lint-imports
	$(BIN)/python -m specdecode_operator.api.crd --check
	hack/check-words

# Commands of hack/ that are Python without the suffix.
PYTHON_SCRIPTS := $(shell grep -lE '^\#!.*python' hack/* hack/cluster/* 2>/dev/null)

check: lint ## what to run before every commit: lint and the tests that need no cluster, in four minutes
	$(BIN)/pytest tests/unit tests/kernels tests/architecture tests/chart --numprocesses auto --dist loadfile

test: lint ## everything that CI runs, on the cluster that is up, or on one that is booted and taken down
	@hack/test

loop: lint ## proofs on the cluster that the operator closes its loop: tasks, load, a collapse, an autoscaler (20 minutes)
	LOOP_PROOFS=1 hack/test tests/e2e/test_9_*.py

router: lint ## proofs on the cluster that clients behind routers notice no fault of a worker, and scaling to zero (15 minutes)
	ROUTER_PROOFS=1 hack/test tests/e2e/test_8_router.py -s

drafts: lint ## proofs on the cluster: drafts are trained from traffic, promoted and rolled back; faults of training (two hours)
	DRAFT_PROOFS=1 hack/test tests/e2e/distillation/test_distillation_loop.py -s
	DRAFT_PROOFS=1 hack/test tests/e2e/test_8_drafts.py tests/e2e/distillation/test_job_faults.py -s
	DRAFT_PROOFS=1 hack/test tests/e2e/distillation/test_changes_under_way.py -s

outages: lint ## proofs that clients notice no lost API server, drained or lost node and rotated key, on a local cluster (20 minutes)
	OUTAGE_PROOFS=1 hack/test tests/e2e/outages -s

lossless: venv ## speculative text equals plain text, on 200 prompts of the embedded model
	LOSSLESS_PROMPTS=200 $(BIN)/pytest tests/lossless

soak: venv ## five minutes of load with misbehaving clients, plans and drafts swapped every few seconds
	SOAK_SECONDS=300 $(BIN)/pytest -s tests/serving/test_soak.py

fuzz: venv ## 10,000 requests made of the worker's OpenAPI document; 500 of them are part of `make test`
	FUZZ_CASES=10000 $(BIN)/pytest --timeout=0 tests/serving/test_fuzz.py

crd-fuzz: venv ## 10,000 specs against the CRD on the cluster that is up, and faults planted in the CRD that this must catch (20 minutes)
	CRD_FUZZ_CASES=10000 CRD_FUZZ_PLANTED=1 $(BIN)/pytest -s --timeout=0 tests/unit/operator/api/test_crd_fuzz.py

faults: venv ## hung engines, hostile clients and full disks against a real worker, with the bounds of docs/security.md
	SLOW_FAULTS=1 $(BIN)/pytest -s tests/faults

extra-node: venv ## a second node on this machine: its pods, its loss and its removal, on the cluster that is up (3 minutes)
	EXTRA_NODE=1 $(BIN)/pytest tests/cluster/test_extra_node.py

network-policies: venv ## the chart's NetworkPolicies, enforced by a firewall on the cluster that is up (3 minutes)
	NETWORK_POLICIES=1 $(BIN)/pytest tests/cluster/test_enforced_policies.py

operator-faults: venv ## the installed operator under the faults of docs/operator-faults.md, on the cluster that is up (45 minutes)
	OPERATOR_FAULTS=1 $(BIN)/pytest -s tests/operator_faults

crds: venv ## write crds/, the chart's copy and docs/api.md from the pydantic models
	$(BIN)/python -m specdecode_operator.api.crd

images: ## build both images into the local cluster's store
	@hack/cluster/images

bench: venv ## speculation against plain decoding on the embedded model, in one run
	$(BIN)/specdecode-worker bench --against plain --model embedded://smollm2-135m-instruct \
	    --draft embedded://smollm2-135m-instruct-eagle3 --concurrency 1,2,4

gpu: ## the gpu tests and benchmarks on this machine's GPU, in ten minutes, into a JSON and a page (out/); PART=1 or 2, STAGE=...
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

requirements: venv ## pin the dependencies of pyproject.toml anew
	@hack/requirements
