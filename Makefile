# Everything a developer or CI calls. The scripts in hack/ do the work; each prints its steps and their times.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# An existing cluster is used only when it is named on this command line: an exported KUBECONFIG may be production.
FOREIGN_KUBECONFIG := $(if $(filter command,$(firstword $(origin KUBECONFIG))),$(KUBECONFIG))
unexport KUBECONFIG
export FOREIGN_KUBECONFIG REGISTRY LOAD QUICK BENCH_ARGS SOAK_REQUESTS SOAK_SEED SOAK_MODEL
# What is not given is left to the scripts.
ifdef VARIANTS
export VARIANTS
endif
ifdef CUDA_ARCHITECTURES
export CUDA_ARCHITECTURES
endif

.PHONY: help up down test lint generate images backends cuda fmt bench profile soak restarts diagrams

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## Start a cluster, Gantry and the demo. KUBECONFIG=file uses a cluster you have, REGISTRY=host/path pushes the images
	@hack/up.sh

down: ## Stop the cluster of `make up` (with KUBECONFIG=file: remove the demo and the chart from that cluster)
	@hack/down.sh

test: ## Run every test: unit, integration and, on a real cluster, end to end
	@hack/test.sh

lint: ## Check formatting, clippy, dependencies, the chart, the shell scripts and that generated files are current
	@hack/lint.sh

generate: ## Write the CRDs from the Rust types, for kubectl and for the chart
	@hack/generate.sh

images: ## Build the images from the Dockerfile
	@hack/images.sh

backends: ## Build CPU backends for newer and older processors, for the server's image; VARIANTS="haswell zen4" chooses
	@hack/backends.sh

cuda: ## Build the CUDA backend for the server's image, without a GPU; CUDA_ARCHITECTURES="80;90" chooses; takes long
	@hack/cuda.sh

fmt: ## Format the Rust and Go sources
	@cargo fmt --all && gofmt -w e2e/cluster e2e/health

bench: ## Measure gantry-server against llama.cpp's llama-server; LOAD="name ..." runs some of the loads, QUICK=1 tries it
	@hack/bench.sh

profile: ## Show in which functions gantry-server spends its time under a load of the benchmark; LOAD=decode-8
	@hack/profile.sh

diagrams: ## Measure the run that the pages of docs/diagrams show, with a small real model, on this machine
	@hack/diagrams.sh

soak: ## Ask one server for everything while it is disturbed, and check every answer; SOAK_REQUESTS=20000, SOAK_SEED=number, SOAK_MODEL=smollm2
	@hack/soak.sh

restarts: export RESTARTS ?= 20
restarts: export RESTART_REQUESTS ?= 20000
restarts: ## Replace servers one after the other under a client with a pool of connections; RESTARTS=20, RESTART_REQUESTS=20000
	@cargo test --release -p gantry-server --test http restarts -- --nocapture
