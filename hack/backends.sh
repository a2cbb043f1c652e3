#!/usr/bin/env bash
# Build ggml's CPU backends for chosen processors as modules that gantry-server loads at run time, into target/backends.
# The server has one linked in (AVX2, FMA, F16C, BMI2: ggml's variant haswell) and needs none of them; docs/operations.md
# says who gains by which.
#
#   hack/backends.sh                          the variants of released images
#   VARIANTS="haswell zen4" hack/backends.sh  these
#   VARIANTS=native hack/backends.sh          the best for this machine's processor; beside others, too
source "$(dirname "$0")/lib.sh"

read -ra variants <<<"${VARIANTS-x64 alderlake skylakex icelake zen4 sapphirerapids}"
build=$cache/backends

native() { # the best of them that this processor can run: each needs all that is asked for before it
  local flags best=x64; flags=" $(grep -m 1 '^flags' /proc/cpuinfo) "
  runs() { local flag; for flag; do [[ $flags == *" $flag "* ]] || return 1; done; }
  if runs avx2 fma f16c bmi2; then
    best=haswell
    ! runs avx_vnni || best=alderlake
    if runs avx512f avx512cd avx512bw avx512dq avx512vl; then
      best=skylakex
      if runs avx512vbmi avx512_vnni; then
        best=icelake
        ! runs avx512_bf16 || best=zen4
        ! runs avx512_bf16 amx_tile amx_int8 || best=sapphirerapids
      fi
    fi
  fi
  echo "$best"
}

prerequisites() {
  [[ $(uname -m) == x86_64 ]] || die "only the variants of x86-64 are built here, this is $(uname -m)"
  require_toolchains
  install_packages build
}

configure() {
  cmake -S server/llama/backends -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_SOURCE="$(ggml_source)" \
    >"$cache/backends-configure.log" 2>&1 || { tail -20 "$cache/backends-configure.log" >&2; return 1; }
}

compile() {
  local variant
  nice ninja -C "$build" ${JOBS:+-j "$JOBS"} "${variants[@]/#/ggml-cpu-}" >"$cache/backends-build.log" ||
    { tail -20 "$cache/backends-build.log" >&2; return 1; }
  prepare_backends
  for variant in "${variants[@]}"; do install_backend "$build/bin/libggml-cpu-$variant.so"; done
}

step prerequisites prerequisites
for at in "${!variants[@]}"; do [[ ${variants[at]} != native ]] || variants[at]=$(native); done
step "ggml: configure" configure
step "CPU backends: ${variants[*]}" compile
steps_summary
