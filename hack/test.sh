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

leave_as_found() {
  local status=$?
  trap - EXIT
  if ! $was_running; then
    "$cluster" down || status=1
  elif ! $was_installed; then
    helm uninstall $release --namespace $system_namespace --ignore-not-found --wait >/dev/null || status=1
  fi
  exit $status
}
trap leave_as_found EXIT
trap 'exit 130' INT TERM

FOREIGN_KUBECONFIG='' use_kubeconfig
unset FOREIGN_KUBECONFIG REGISTRY

prerequisites() { require_toolchains; require_go; install_packages build images cluster; }

# One selection of packages throughout: another would resolve other features, and compile the dependencies once more.
tests() { cargo test --release --locked --workspace "$@" 2>&1 | tee -a "$log"; }

integration_tests() { # integration_tests OPERATOR: --test NAME for each of gantry-e2e (==), or of every other package (!=)
  cargo metadata --no-deps --format-version 1 | jq -r ".packages[] | select(.name $1 \"gantry-e2e\") | .targets[] |
    select(.kind == [\"test\"]) | \"--test\\n\" + .name"
}

local_tests() {
  local -a others
  mapfile -t others < <(integration_tests '!=')
  tests --lib --bins "${others[@]}"
  tests --doc
}

e2e_tests() {
  local -a targets
  mapfile -t targets < <(integration_tests '==')
  ((${#targets[@]})) || die "gantry-e2e has no integration tests"
  # They are marked as ignored: they need this cluster.
  GANTRY_E2E_IMAGE=$(e2e_image) tests "${targets[@]}" -- --test-threads=1 --nocapture --include-ignored
}

counts() { # of every suite together, in the form of each
  awk '/^test result: / {suites++; passed += $4; failed += $6; ignored += $8}
    END {printf "\ntest result: all %d suites: %d passed; %d failed; %d ignored\n", suites, passed, failed, ignored}' "$log"
}

step prerequisites prerequisites
step "binaries and tests (cargo build --release)" cargo build --release --locked --workspace --bins --tests
step "tests without a cluster" local_tests
step "cluster: build its binaries" "$cluster" build
step "cluster: start" "$cluster" up
[[ -z $(helm list --namespace $system_namespace --filter "^$release\$" --short) ]] || was_installed=true
step "images: build and load" hack/images.sh load
step "chart: helm upgrade --install $release" install_chart
step "tests on the cluster" e2e_tests
steps_summary
counts
