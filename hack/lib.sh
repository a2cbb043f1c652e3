# Shared by the scripts beside it: where things are, steps with their times, and what the machine must have.
# shellcheck shell=bash disable=SC2034 # what looks unused here is used there
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$root/.cache       # everything that is not a build output of cargo or Go: safe to delete
cluster_dir=$root/e2e/cluster
cluster=$cluster_dir/cluster
real_models=$cache/models # see models.sh
own_kubeconfig=${CLUSTER_STATE:-/var/lib/gantry-cluster}/admin.conf

system_namespace=gantry-system
release=gantry
demo_namespace=demo
demo_service=chat

cd "$root"
mkdir -p "$cache"

# --- steps ---------------------------------------------------------------------------------------------------------

step_names=() step_times=()

step() { # step NAME COMMAND...: run COMMAND, show NAME before it and the elapsed time after it
  local name=$1 begin=$EPOCHREALTIME status=0; shift
  printf '\n\033[1m==> %s\033[0m\n' "$name"
  # `|| status=$?` would switch `set -e` off inside a function: a subshell of its own keeps it.
  set +e; (set -e; "$@"); status=$?; set -e
  local elapsed; elapsed=$(seconds_since "$begin")
  step_names+=("$name") step_times+=("$elapsed")
  ((status == 0)) || { printf '\033[31m==> %s failed after %s s\033[0m\n' "$name" "$elapsed" >&2; exit "$status"; }
  printf '    %s: %s s\n' "$name" "$elapsed"
}

seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.1f", b - a}'; }

steps_summary() {
  local i
  printf '\n%-44s %8s\n' step seconds
  for i in "${!step_names[@]}"; do printf '%-44s %8s\n' "${step_names[i]}" "${step_times[i]}"; done
  printf '%-44s %8s\n' total "$(printf '%s\n' "${step_times[@]}" | awk '{s += $1} END {printf "%.1f", s}')"
}

die() { printf 'error: %s\n' "$*" >&2; exit 1; }
note() { printf '    %s\n' "$*"; }

# --- the machine ---------------------------------------------------------------------------------------------------

# Not libclang-cpp, which other packages bring and bindgen cannot load.
has_libclang() { { ldconfig -p; ls /usr/lib/llvm-*/lib 2>/dev/null || true; } | grep -E 'libclang(-[0-9]+)?\.so' >/dev/null; }
has() { command -v "$1" >/dev/null; }
at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -1) == "$1" ]]; } # at_least WANTED FOUND

require_toolchains() {
  has cargo || die "cargo is missing: install Rust from https://rustup.rs"
  local rust; rust=$(cargo --version | awk '{print $2}')
  at_least 1.95 "$rust" || die "Rust 1.95 or later is needed, this is $rust: rustup update stable"
}

require_go() {
  has go || die "go is missing: install Go 1.24 or later from https://go.dev/dl"
  local go; go=$(go env GOVERSION | sed 's/^go//')
  at_least 1.24 "$go" || die "Go 1.24 or later is needed, this is $go: see https://go.dev/dl"
}

missing_packages() { # missing_packages build|cluster|images...: Debian packages whose tool is not there, one a line
  local group pair
  for group in "$@"; do
    case $group in
      build) # llama.cpp and its bindings
        for pair in cmake:cmake ninja:ninja-build g++:g++ clang:clang git:git; do has "${pair%%:*}" || echo "${pair#*:}"; done
        has_libclang || echo libclang-dev ;;
      cluster)
        for pair in containerd:containerd ctr:containerd runc:runc iptables:iptables conntrack:conntrack ip:iproute2 curl:curl; do
          has "${pair%%:*}" || echo "${pair#*:}"
        done
        [[ -x /usr/lib/cni/bridge ]] || echo containernetworking-plugins ;;
      images) for pair in buildah:buildah mmdebstrap:mmdebstrap jq:jq curl:curl; do has "${pair%%:*}" || echo "${pair#*:}"; done ;;
      profile) has perf || echo linux-perf ;;
      python) python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv ;;
      monitoring) has promtool || echo prometheus ;;
      browser) has chromium || echo chromium ;; # for the test of docs/diagrams
      lint) for pair in shellcheck:shellcheck curl:curl jq:jq; do has "${pair%%:*}" || echo "${pair#*:}"; done ;;
    esac
  done | sort -u
}

install_packages() { # install_packages GROUP...: what is missing and nothing else
  local -a packages
  mapfile -t packages < <(missing_packages "$@")
  ((${#packages[@]})) || { note "all there"; return; }
  has apt-get || die "missing: ${packages[*]} (names of Debian 12; install them with your package manager)"
  [[ $(id -u) == 0 ]] || die "missing: run as root, or: apt-get install ${packages[*]}"
  note "installing ${packages[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >"$cache/apt.log" 2>&1 ||
    { tail -20 "$cache/apt.log" >&2; die "apt-get install ${packages[*]} failed"; }
}

# --- the cluster ---------------------------------------------------------------------------------------------------

is_foreign() { [[ -n ${FOREIGN_KUBECONFIG:-} && $FOREIGN_KUBECONFIG != "$own_kubeconfig" ]]; }

use_kubeconfig() {
  if is_foreign; then
    [[ -r $FOREIGN_KUBECONFIG ]] || die "KUBECONFIG=$FOREIGN_KUBECONFIG cannot be read"
    KUBECONFIG=$(realpath "$FOREIGN_KUBECONFIG")
    # The tools of the user's cluster come first; those that an earlier `make up` built here do as well.
    PATH=$PATH:$cluster_dir/bin
    local tool
    for tool in kubectl helm; do has $tool || die "$tool is missing: it is needed to use a cluster of your own"; done
  else
    KUBECONFIG=$own_kubeconfig PATH=$cluster_dir/bin:$PATH
  fi
  export KUBECONFIG PATH
}

build_binaries() { cargo build --release --locked --workspace --bins; }

# --- ggml's backends as modules ------------------------------------------------------------------------------------

backends=$root/target/backends # what an image of the server gets, and --backend-dir wants
backend_args=()                # what a benchmark's servers get; elsewhere there is only what they have linked in
[[ $(uname -m) != x86_64 ]] || backend_args=(--backend-dir target/backends)

llama_version() { awk '$0 == "name = \"llama-cpp-sys-2\"" {getline; gsub(/[^0-9.]/, ""); print}' Cargo.lock; }

ggml_source() { # the ggml that the server has linked in
  local manifest
  manifest=$(cargo metadata --format-version 1 --locked | grep -oE '"manifest_path":"[^"]*/llama-cpp-sys-2-[^"]*/Cargo.toml"')
  manifest=${manifest#*:\"}
  echo "${manifest%/Cargo.toml\"}/llama.cpp/ggml"
}

prepare_backends() { # the directory, with the modules of this llama.cpp only: the server refuses others
  local wanted; wanted="llama-cpp-sys-2 $(llama_version)"
  if [[ -d $backends && $(cat "$backends/VERSION" 2>/dev/null) != "$wanted" ]]; then
    note "removing what $backends has of another llama.cpp"
    rm -rf "$backends"
  fi
  mkdir -p "$backends"
  echo "$wanted" >"$backends/VERSION"
}

install_backend() { # install_backend FILE: it needs no other ggml than the server's, and nothing that the server has not
  local file=$1 name lacking; name=$(basename "$1")
  ! readelf -d "$file" | grep -E 'NEEDED.*libggml' >&2 || die "$name brings another ggml with it"
  if [[ -x target/release/gantry-server ]]; then
    lacking=$(comm -23 <(nm -D --undefined-only "$file" | awk '$2 ~ /^(ggml|gguf|quantize|dequantize)_/ {print $2}' | sort -u) \
      <(nm -D --defined-only target/release/gantry-server | awk '{print $3}' | sort -u))
    [[ -z $lacking ]] || die "gantry-server does not export what $name needs (server/llama/link_args.rs): ${lacking//$'\n'/ }"
  fi
  install -m 755 "$file" "$backends/.new" && mv "$backends/.new" "$backends/$name"
  note "$name: $(du -k "$backends/$name" | cut -f1) KiB"
}

# --- the chart -----------------------------------------------------------------------------------------------------

chart_values() { # the --set arguments for the images of this checkout, one a line; none for the chart's own images
  local prefix
  if is_foreign; then
    [[ -n ${REGISTRY:-} ]] || return 0
    prefix=$REGISTRY
  else
    prefix=gantry.dev
  fi
  printf -- '--set-string\n%s\n' "image.repository=$prefix/operator" "image.tag=$(hack/images.sh tag operator)" \
    "serverImage.repository=$prefix/server" "serverImage.tag=$(hack/images.sh tag server)"
}

e2e_image() {
  if ! is_foreign; then echo "gantry.dev/e2e:$(hack/images.sh tag e2e)"
  elif [[ -n ${REGISTRY:-} ]]; then echo "$REGISTRY/e2e:$(hack/images.sh tag e2e)"
  else echo "ghcr.io/gantry-dev/gantry-e2e:$(awk '$1 == "appVersion:" {print $2}' charts/gantry/Chart.yaml)"; fi
}

ensure_namespace() { # ensure_namespace NAME: there, and under the Pod Security Standard `restricted`
  kubectl create namespace "$1" --dry-run=client -o yaml | kubectl apply --server-side --field-manager=gantry-hack -f - >/dev/null
  kubectl label namespace "$1" pod-security.kubernetes.io/enforce=restricted pod-security.kubernetes.io/warn=restricted \
    --overwrite >/dev/null
}

installed_images() { helm get values $release --namespace $system_namespace --output json | jq -r '.image.tag // empty, .serverImage.tag // empty'; }

install_chart() { # a release with the same chart and values is left alone
  local -a values
  local hash
  mapfile -t values < <(chart_values)
  hash=$({ find charts/gantry -type f | sort | xargs sha256sum; printf '%s\n' "${values[@]}"; } | sha256sum | cut -c1-40)
  # An upgrade by hand, or by a test, inherits the label: the images are compared as well.
  if [[ -n $(helm list --namespace $system_namespace --deployed --selector "gantry-inputs=$hash" --short) ]] &&
    [[ $(installed_images) == "$(printf '%s\n' "${values[@]}" | sed -n 's/^\(image\|serverImage\)\.tag=//p')" ]]; then
    note "release $release is current"
  else
    ensure_namespace $system_namespace
    is_foreign || values+=(--take-ownership) # of CRDs that were applied by hand
    helm upgrade --install $release charts/gantry --namespace $system_namespace --labels "gantry-inputs=$hash" \
      "${values[@]}" >"$cache/helm.log" || { cat "$cache/helm.log" >&2; return 1; }
    note "release $release $(awk '$1 == "REVISION:" {print "revision " $2}' "$cache/helm.log")"
  fi
  kubectl --namespace $system_namespace rollout status "deployment/$release-operator" --timeout=120s | tail -1 | sed 's/^/    /' ||
    { explain_namespace $system_namespace; return 1; }
}

explain_namespace() { # what one needs when something in a namespace does not come up
  kubectl --namespace "$1" get infs,mv,deployments,pods -o wide 2>&1 || true
  kubectl --namespace "$1" get events --sort-by=.lastTimestamp 2>&1 | tail -15 || true
  kubectl --namespace "$1" logs --all-containers --prefix --tail=20 --selector app.kubernetes.io/name 2>&1 | tail -60 || true
} >&2
