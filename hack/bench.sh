#!/usr/bin/env bash
# The benchmark. What it needs is made once, in .cache/bench: llama.cpp's own programs, compiled for this machine, and
# models of a real one's shape. Then gantry-server and llama-server run in turn; docs/performance.md says more.
#
#   hack/bench.sh            every load
#   hack/bench.sh prepare    only what it needs
#
# LOAD="name ..." runs these loads, QUICK=1 tries the harness in small, BENCH_ARGS goes to `gantry-bench run` as it is.
source "$(dirname "$0")/lib.sh"

bench=$cache/bench
peer=$bench/peer
models=$bench/models
venv=$bench/venv

# The peer is llama.cpp as this source distribution brings it, whose file is checked.
peer_package=llama-cpp-python==0.3.36
peer_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
peer_programs=(llama-quantize llama-bench llama-batched-bench llama-server)
peer_flags=(-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON) # the rest is as it comes, but for what no load needs,
# and for a header without which it does not start where there is AMX (the file says why), as ours would not:
peer_header=$PWD/server/llama/backends/amx.h
peer_unused=(-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON) # the last: it may be moved
vocabulary=$peer/vendor/llama.cpp/models/ggml-vocab-qwen2.gguf
python_packages=(gguf==0.19.0 numpy==2.4.6)

prerequisites() {
  require_toolchains
  install_packages build
  has python3 || die "python3 is missing: it writes the models"
  mkdir -p "$models"
}

python_environment() {
  [[ -f $venv/installed && $(<"$venv/installed") == "${python_packages[*]}" ]] && { note "there"; return; }
  python3 -m venv "$venv" || die "python3 -m venv failed: apt-get install python3-venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${python_packages[@]}"
  echo "${python_packages[*]}" >"$venv/installed"
}

peer_source() {
  [[ -f $peer/PKG-INFO ]] && { note "there"; return; }
  local fetched=$bench/fetched
  rm -rf "$fetched" "$peer.new"
  mkdir -p "$fetched" "$peer.new"
  "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --require-hashes --requirement <(echo "$peer_package --hash=sha256:$peer_sha256") --dest "$fetched"
  tar --extract --gzip --file "$fetched"/*.tar.gz --directory "$peer.new" --strip-components=1
  rm -rf "$fetched" "$peer"
  mv "$peer.new" "$peer"
}

peer_build() { # ninja goes on where it was interrupted
  local all=true program
  for program in "${peer_programs[@]}"; do [[ -x $peer/build/bin/$program ]] || all=false; done
  $all && { note "there"; return; }
  # SOURCE_DATE_EPOCH would turn GGML_NATIVE off.
  env -u SOURCE_DATE_EPOCH cmake -S "$peer/vendor/llama.cpp" -B "$peer/build" -G Ninja \
    "${peer_flags[@]}" "${peer_unused[@]}" -DCMAKE_CXX_FLAGS="-include $peer_header" >"$bench/peer-configure.log" ||
    { tail -20 "$bench/peer-configure.log" >&2; return 1; }
  nice ninja -C "$peer/build" ${JOBS:+-j "$JOBS"} "${peer_programs[@]}" >"$bench/peer-build.log" ||
    { tail -20 "$bench/peer-build.log" >&2; return 1; }
}

make_model() { # make_model NAME ARGUMENT... -- TYPE...: NAME.TYPE.gguf, quantised from one of random weights
  local name=$1 type missing=false; shift
  local -a shape=()
  while [[ $1 != -- ]]; do shape+=("$1"); shift; done
  shift
  for type in "$@"; do [[ -f $models/$name.$type.gguf ]] || missing=true; done
  $missing || { note "$name is there"; return; }
  "$venv/bin/python" e2e/bench/random_gguf.py "$vocabulary" "$models/$name.gguf" "${shape[@]}"
  for type in "$@"; do
    "$peer/build/bin/llama-quantize" "$models/$name.gguf" "$models/new.gguf" "${type^^}" >"$bench/quantize.log" 2>&1 ||
      { tail -20 "$bench/quantize.log" >&2; return 1; }
    local list
    for list in words phrases; do
      [[ ! -f $models/$name.$list ]] || cp "$models/$name.$list" "$models/$name.$type.$list"
    done
    mv "$models/new.gguf" "$models/$name.$type.gguf"
    note "$name.$type.gguf: $(du -m "$models/$name.$type.gguf" | cut -f1) MiB"
  done
  rm -f "$models/$name.gguf" "$models/$name.words" "$models/$name.phrases"
}

make_models() {
  make_model qwen-shape -- q4_0 q8_0
  make_model qwen-shape-repeating --phrase-tokens 24 -- q4_0
  local name
  for name in smollm2 gemma3; do
    hack/models.sh $name
    ln -sf "$root/$(hack/models.sh --path $name)" "$models/"
  done
}

own_programs() { cargo build --release --locked --package gantry-server --package gantry-bench --bins; }

# The peer is built for this processor, so ours is what an image would load on it.
own_backend() { VARIANTS=native hack/backends.sh; }

run() {
  local -a args=("${backend_args[@]}")
  local load
  for load in ${LOAD:-}; do args+=(--load "$load"); done
  [[ -z ${QUICK:-} ]] || args+=(--quick)
  # shellcheck disable=SC2206 # several arguments
  args+=(${BENCH_ARGS:-})
  # Paths are relative, so that results do not tell where this checkout is.
  target/release/gantry-bench run --peer-build "$peer_package, ${peer_flags[*]}, with ${peer_header#"$PWD/"}" "${args[@]}"
}

step prerequisites prerequisites
step "Python environment" python_environment
step "llama.cpp: source" peer_source
step "llama.cpp: build" peer_build
step models make_models
step "our programs" own_programs
((${#backend_args[@]} == 0)) || step "our CPU backend" own_backend
[[ ${1:-} == prepare ]] || step loads run
steps_summary
