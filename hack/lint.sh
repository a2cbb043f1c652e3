#!/usr/bin/env bash
# What can be said about the sources without running them. Tools of exact versions go to .cache/tools.
source "$(dirname "$0")/lib.sh"

cargo_deny_version=0.20.2
advisory_database=https://github.com/RustSec/advisory-db
tools=$cache/tools
PATH=$tools/bin:$cluster_dir/bin:$PATH

prerequisites() {
  require_toolchains
  require_go
  install_packages build
  [[ $(id -u) != 0 ]] || install_packages lint monitoring
  rustup component add clippy rustfmt >/dev/null 2>&1 || { cargo clippy --version && cargo fmt --version; } >/dev/null
}

install_cargo_deny() { # the only binaries in package registries are too old for edition 2024; unoptimised it compiles in half the time
  [[ $(cargo-deny --version 2>/dev/null) == "cargo-deny $cargo_deny_version" ]] && { note "cargo-deny $cargo_deny_version is there"; return; }
  CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
    cargo install --quiet --locked --root "$tools" cargo-deny@$cargo_deny_version
}

dependencies() {
  cargo-deny --log-level error check licenses bans sources
  if curl -fs --max-time 10 -o /dev/null "$advisory_database/info/refs?service=git-upload-pack"; then
    cargo-deny --log-level error check advisories
  else
    note "advisories: not checked, $advisory_database cannot be reached"
  fi
}

chart() {
  helm lint --strict --quiet charts/gantry
  helm lint --strict --quiet charts/gantry --set replicas=2 --set metrics.serviceMonitor.enabled=true \
    --set metrics.prometheusRule.enabled=true --set metrics.dashboards.enabled=true
  # The same flags as the cluster's programs have: most of it is compiled.
  (cd e2e/cluster && CGO_ENABLED=0 go test -vet=off -trimpath -tags providerless,netgo ./admission)
  (cd e2e/health && CGO_ENABLED=0 go test -vet=off -trimpath .)
}

monitoring() { # each alert fires when it should; what alerts and dashboards ask for is there, and can be asked so
  local files=charts/gantry/files/monitoring metric queries=$cache/dashboards-rules.yaml
  promtool test rules charts/gantry/tests/alerts.yaml >"$cache/alerts.log" || { cat "$cache/alerts.log" >&2; die "alerts do not fire as they should"; }
  jq -n '{groups: [{name: "dashboards", rules: [inputs | .. | .expr? // empty
    | gsub("\\$__rate_interval"; "5m") | gsub("\\$(namespace|service)"; ".*") | {record: "query", expr: .}]}]}' $files/dashboards/*.json >"$queries"
  promtool check rules --lint=none $files/alerts.yaml "$queries" >"$cache/alerts.log" 2>&1 || { cat "$cache/alerts.log" >&2; die "a query is none"; }
  grep -ohE '\bgantry_[a-z_]+' $files/alerts.yaml $files/dashboards/*.json | sed -E 's/_(bucket|sum|count)$//' | sort -u | while read -r metric; do
    grep -q "^| \`$metric\` " docs/metrics.md || die "$metric, which alerts or dashboards ask for, is not in docs/metrics.md"
  done
}

generated() {
  local before after
  before=$(generated_state)
  hack/generate.sh
  after=$(generated_state)
  [[ $before == "$after" ]] || die "crds/yaml or charts/gantry/files/crds was stale: it is written now, commit it"
  [[ -z $(git status --porcelain -- crds/yaml charts/gantry/files/crds) ]] ||
    die "crds/yaml or charts/gantry/files/crds differs from the last commit: commit it"
}
generated_state() { find crds/yaml charts/gantry/files/crds -type f -print0 2>/dev/null | sort -z | xargs -0 -r sha256sum; }

go_sources() {
  local unformatted
  unformatted=$(gofmt -l e2e/cluster e2e/health)
  [[ -z $unformatted ]] || die "not formatted, run make fmt: $unformatted"
}

# What a request is, how protocols write it, and what an agent decides is for programs without llama.cpp, too.
without_cpp() {
  local crate tree
  for crate in gantry-core gantry-rollout gantry-openai gantry-responses gantry-anthropic gantry-generate; do
    tree=$(cargo tree --locked --package "$crate" --edges normal,build --prefix none)
    ! grep -q '^llama-cpp-sys-2 ' <<<"$tree" ||
      die "$crate depends on llama-cpp-sys-2: cargo tree --package $crate --edges normal,build --invert llama-cpp-sys-2 says by what"
  done
}

# What nobody notices who does not measure: without, a prompt takes up to 1.7 times as long.
compiled_for_speed() {
  has_line() { grep -qE "$1" "$2" || die "$2 has no line '$1': $3"; }
  has_line '^set\(GGML_CUDA_GRAPHS ON ' server/llama/backends/CMakeLists.txt "ggml leaves graphs out without it"
  has_line 'VARIANTS=\$\{VARIANTS-native\} hack/backends.sh' hack/up.sh "the image of 'make up' has the best backend for its machine"
  has_line '^ARG VARIANTS="x64 alderlake skylakex icelake zen4 sapphirerapids"$' Dockerfile "a released image has a backend for every processor"
}

scripts() {
  has shellcheck || { note "not checked: shellcheck is missing"; return; }
  shellcheck --shell=bash --external-sources --source-path=hack hack/*.sh .ci/run e2e/cluster/cluster
}

step prerequisites prerequisites
step "cargo fmt --check" cargo fmt --all --check
step gofmt go_sources
step shellcheck scripts
step "images are compiled for speed" compiled_for_speed
step "cargo clippy" cargo clippy --release --locked --workspace --all-targets -- -D warnings
step "the core and protocols link no C++" without_cpp
step "generated CRDs are current" generated
step "cargo-deny $cargo_deny_version" install_cargo_deny
step "cargo deny check" dependencies
step "helm: build" "$cluster" build
step "helm lint" chart
step "alerts and dashboards" monitoring
steps_summary
