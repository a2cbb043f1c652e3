#!/usr/bin/env bash
# Clients that others made and that must work unmodified, for tests: from PyPI and npm, in the versions that
# e2e/clients/{python,lm_eval,fuzz}/requirements.txt and e2e/clients/node/package-lock.json pin, in
# .cache/clients.
#
#   hack/clients.sh          install them
#   hack/clients.sh --path   only say where they are
source "$(dirname "$0")/lib.sh"

clients=$cache/clients
[[ ${1:-} == --path ]] && { echo "$clients"; exit; }

python_clients() { # python_clients FOLDER
  local wanted=e2e/clients/$1/requirements.txt folder=$clients/$1
  cmp --silent "$wanted" "$folder/installed" && { note "there"; return; }
  rm -rf "$folder"
  python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: --requirement "$wanted"
  cp "$wanted" "$folder/installed"
}

node_clients() {
  local lock=package-lock.json major
  has npm || { note "left out: npm is missing"; return; }
  major=$(node -p 'process.versions.node.split(".")[0]')
  ((major >= 20)) || { note "left out: Node 20 or later is needed, this is $major"; return; }
  cmp --silent e2e/clients/node/$lock "$clients/node/$lock" && { note "there"; return; }
  rm -rf "$clients/node"
  mkdir -p "$clients/node"
  cp e2e/clients/node/package.json e2e/clients/node/$lock "$clients/node/"
  npm --prefix "$clients/node" ci --silent --no-fund --no-audit || { rm "$clients/node/$lock"; return 1; }
}

step prerequisites install_packages python
mkdir -p "$clients"
step "clients for Python" python_clients python
step "the harness for evaluations" python_clients lm_eval
step "schemathesis" python_clients fuzz
step "clients for Node" node_clients
steps_summary
