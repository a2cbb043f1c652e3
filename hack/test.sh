#!/usr/bin/env bash
# Every test: first those that need no cluster, then the cluster's. A cluster that was not running is stopped again, a
# release that was not installed is removed.
source "$(dirname "$0")/lib.sh"

# A second caller would stop the cluster under the first one's tests.
exec {lock}>"$cache/test.lock"
flock --nonblock $lock || die "another 'make test' runs in this checkout"

log=$cache/test.log
: >"$log"
was_running=false was_installed=false
! "$cluster" status >/dev/null 2>&1 || was_running=true

counts() { # of every suite that ran, together, in the plain form that CI systems read: the last line, however it ends
  awk '/^test result: / {passed += $4; failed += $6} END {printf "\n%d passed, %d failed\n", passed, failed}' "$log"
}

leave_as_found() {
  local status=$?
  trap - EXIT
  if ! $was_running; then
    "$cluster" down || status=1
  elif ! $was_installed; then
    helm uninstall $release --namespace $system_namespace --ignore-not-found --wait >/dev/null || status=1
  fi
  counts
  exit $status
}
trap leave_as_found EXIT
trap 'exit 130' INT TERM

FOREIGN_KUBECONFIG='' use_kubeconfig
unset FOREIGN_KUBECONFIG REGISTRY

prerequisites() { require_toolchains; require_go; install_packages build images cluster python monitoring; }

# Always the whole workspace: part of it would resolve other features, and compile the dependencies once more.
tests() { cargo test --release --locked --workspace "$@" 2>&1 | tee -a "$log"; }

page_tests() { hack/diagrams.sh test 2>&1 | tee -a "$log"; }

e2e_tests() { tests --test cluster -- --ignored --test-threads=1 --nocapture; }

step prerequisites prerequisites
step "binaries and tests (cargo build --release)" cargo build --release --locked --workspace --bins --tests
step "CPU backends as modules, for the tests and the image" env VARIANTS="haswell native" hack/backends.sh
export GANTRY_TEST_BACKENDS=$backends # without, the tests that load it are left out
step "real models, for tests" hack/models.sh
GANTRY_TEST_MODELS=$(find "$real_models" -name '*.gguf' | paste -sd:) # likewise
export GANTRY_TEST_MODELS
step "client libraries, for tests" hack/clients.sh
GANTRY_TEST_CLIENTS=$(hack/clients.sh --path) # likewise
export GANTRY_TEST_CLIENTS
step "tests without a cluster" tests
step "pages of docs/diagrams in a browser" page_tests
step "cluster: build its binaries" "$cluster" build
step "cluster: start" "$cluster" up
[[ -z $(helm list --namespace $system_namespace --filter "^$release\$" --short) ]] || was_installed=true
step "images: build and load" hack/images.sh load
step "chart: helm upgrade --install $release" install_chart
step "tests on the cluster" e2e_tests
steps_summary
