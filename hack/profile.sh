#!/usr/bin/env bash
# Where a server's processor time goes under one load of the benchmark, without the peer: `perf` looks 199 times a second at
# what each thread is in. Into .cache/bench/profile: LOAD.txt, the functions by their share, and LOAD.svg, a flame graph.
#
#   LOAD=decode-8 hack/profile.sh
source "$(dirname "$0")/lib.sh"

load=${LOAD:-decode-8}
out=$cache/bench/profile
tools=$cache/tools
inferno_version=0.12.8
export PATH=$tools/bin:$PATH

prerequisites() {
  require_toolchains
  install_packages build profile
  mkdir -p "$out"
}

install_inferno() { # which draws the flame graph
  grep -qs "inferno $inferno_version" "$tools/.crates.toml" && { note "there"; return; }
  cargo install --quiet --locked --root "$tools" inferno@$inferno_version
}

benchmark() { "$(dirname "$0")/bench.sh" prepare; }

record() { # the client too: its threads are in the list, and not in the flame graph
  perf record --output "$out/$load.data" --freq 199 --call-graph dwarf,4096 --quiet -- \
    target/release/gantry-bench run --only-ours --load "$load" --repeats 1 "${backend_args[@]}"
}

draw() {
  # Without names of inlined functions, which take perf minutes to find.
  perf report --input "$out/$load.data" --no-children --no-inline --sort comm,symbol --percent-limit 0.1 --stdio \
    --call-graph none 2>/dev/null | grep -v '^#' | grep -v '^$' >"$out/$load.txt"
  # "thread-pid;function;...": the client's threads have the same names as the server's.
  perf script --input "$out/$load.data" --no-inline --fields comm,pid,tid,time,event,ip,sym,dso 2>/dev/null |
    inferno-collapse-perf --pid 2>/dev/null >"$out/$load.all"
  local client
  client=$(grep -m 1 -o '^gantry-bench-[0-9]*' "$out/$load.all" | grep -o '[0-9]*$')
  grep -v -e "^[^;]*-$client;" -e '^git-' "$out/$load.all" | sed 's/^\([^;]*\)-[0-9?]*;/\1;/' >"$out/$load.folded"
  rm -f "$out/$load.all"
  inferno-flamegraph --title "gantry-server under $load" "$out/$load.folded" >"$out/$load.svg"
  rm -f "$out/$load.data"
  head -25 "$out/$load.txt"
  note "$out/$load.txt, $out/$load.svg"
}

step prerequisites prerequisites
step inferno install_inferno
step "what the benchmark needs" benchmark
step "perf record: $load" record
step "flame graph" draw
steps_summary
