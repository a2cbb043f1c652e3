#!/usr/bin/env bash
# The soak: random requests to a real server, a demo model on it, while clients leave, workers die or stand still and the
# disk cache goes bad. Every answer is checked and memory must be flat; the report is in .cache/soak/soak.json.
# SOAK_REQUESTS says how many (20,000 unless it does), SOAK_SEED repeats what was random, SOAK_MODEL=smollm2 or =gemma3 takes
# a real model.
source "$(dirname "$0")/lib.sh"

prerequisites() { require_toolchains; install_packages build; }

programs() { cargo build --release --locked --package gantry-server --package gantry-bench --bins; }

run() {
  local -a args=(--requests "${SOAK_REQUESTS:-20000}")
  [[ -z ${SOAK_SEED:-} ]] || args+=(--seed "$SOAK_SEED")
  [[ -z ${SOAK_MODEL:-} ]] || args+=(--model "$(hack/models.sh --path "$SOAK_MODEL")")
  target/release/gantry-bench soak "${args[@]}"
}

step prerequisites prerequisites
step programs programs
[[ -z ${SOAK_MODEL:-} ]] || step "the model" hack/models.sh "$SOAK_MODEL"
step soak run
steps_summary
