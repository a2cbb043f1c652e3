#!/usr/bin/env bash
# Build ggml's CUDA backend as a module that gantry-server loads at run time, with the NVIDIA libraries that it needs, into
# target/backends. The compiler comes as Python packages and no GPU is needed. It takes long: 144 files for each
# architecture.
#
#   hack/cuda.sh                                  for compute capability 9.0 (H100, H200)
#   CUDA_ARCHITECTURES="80;90" hack/cuda.sh       as CMAKE_CUDA_ARCHITECTURES has it
source "$(dirname "$0")/lib.sh"

architectures=${CUDA_ARCHITECTURES:-90}
cuda=$cache/cuda
venv=$cuda/venv
build=$cuda/build
requirements=hack/cuda-requirements.txt

prerequisites() {
  require_toolchains
  install_packages build
  has python3 || die "python3 is missing: it brings the compiler"
  mkdir -p "$cuda"
}

toolkit() { # where the packages put it
  local found
  found=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
  [[ -x $found/bin/nvcc ]] || die "$found has no bin/nvcc: remove $venv and run this again"
  echo "$found"
}

packages() {
  local wanted root name
  wanted=$(sha256sum $requirements)
  if [[ -f $venv/installed && $(<"$venv/installed") == "$wanted" ]]; then note "there"; return; fi
  python3 -m venv "$venv" || die "python3 -m venv failed: apt-get install python3-venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r $requirements
  root=$(toolkit)
  # The packages have the libraries under the names that programs load; the linker wants those without a version.
  for name in "$root"/lib/lib*.so.*; do ln -sf "$(basename "$name")" "${name%%.so.*}.so"; done
  echo "$wanted" >"$venv/installed"
}

# The driver's library is on machines with a GPU. The linker needs its name, and what the backend calls of it.
driver_stub() {
  local root; root=$(toolkit)
  mkdir -p "$root/lib/stubs"
  grep -rhoE '\bcu[A-Z][a-z][A-Za-z0-9]*[[:space:]]*\(' "$(ggml_source)/src/ggml-cuda" --include='*.cu' --include='*.cuh' |
    tr -d ' (' | sort -u | sed 's/.*/int &(void) { return 100; }/' >"$cuda/stub.c" # CUDA_ERROR_NO_DEVICE
  cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$root/lib/stubs/libcuda.so" "$cuda/stub.c"
}

configure() {
  local root; root=$(toolkit)
  PATH=$root/bin:$PATH CUDACXX=$root/bin/nvcc cmake -S server/llama/backends -B "$build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_SOURCE="$(ggml_source)" -DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF \
    -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DCUDAToolkit_ROOT="$root" \
    -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared >"$cuda/configure.log" 2>&1 ||
    { tail -20 "$cuda/configure.log" >&2; return 1; }
  # Without graphs each kernel of a step is launched by itself: slower, and nothing would say so.
  grep -q GGML_CUDA_USE_GRAPHS "$build/build.ninja" || die "the CUDA backend would be compiled without CUDA graphs"
}

compile() {
  local root; root=$(toolkit)
  PATH=$root/bin:$PATH nice ninja -C "$build" ${JOBS:+-j "$JOBS"} ggml-cuda >"$cuda/build.log" ||
    { tail -20 "$cuda/build.log" >&2; return 1; }
}

install_all() {
  local root library; root=$(toolkit)
  prepare_backends
  install_backend "$build/bin/libggml-cuda.so"
  # Beside the module, where it looks first. The driver's own comes from the node.
  for library in libcudart.so.13 libcublas.so.13 libcublasLt.so.13; do
    install -m 755 "$root/lib/$library" "$backends/"
    note "$library: $(du -m "$backends/$library" | cut -f1) MiB"
  done
}

step prerequisites prerequisites
step "CUDA compiler and libraries" packages
step "driver's interface" driver_stub
step "ggml: configure for $architectures" configure
step "CUDA backend" compile
step install install_all
steps_summary
