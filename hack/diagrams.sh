#!/usr/bin/env bash
# The pages of docs/diagrams: the run that they show, and the test that opens them in a browser. d3 and what drives the
# browser come from npm, in the versions that e2e/diagrams/package-lock.json pins, into .cache/diagrams.
#
#   hack/diagrams.sh         measure anew with SmolLM2, and write docs/diagrams/run.js
#   hack/diagrams.sh test    open the pages in Chromium, use every control
#   hack/diagrams.sh d3      after another version was pinned: put its file and its licence beside the pages
#
# GANTRY_SERVER=program measures this one and compiles nothing; PATIENCE_MINUTES says how long a quiet machine is waited for.
source "$(dirname "$0")/lib.sh"

pages=docs/diagrams
sources=e2e/diagrams
installed=$cache/diagrams

node_version() { # what measures and tests are programs for it
  has npm || die "npm is missing: install Node 20 or later"
  local major; major=$(node -p 'process.versions.node.split(".")[0]')
  ((major >= 20)) || die "Node 20 or later is needed, this is $major"
}

npm_packages() {
  local lock=package-lock.json
  cmp --silent $sources/$lock "$installed/$lock" && { note "there"; return; }
  rm -rf "$installed"
  mkdir -p "$installed"
  cp $sources/package.json $sources/$lock "$installed/"
  npm --prefix "$installed" ci --silent --no-fund --no-audit --ignore-scripts || { rm "$installed/$lock"; return 1; }
}

measure() {
  local model commit
  model=$(hack/models.sh --path smollm2)
  commit=$(git rev-parse --short HEAD)
  [[ -d $backends ]] || backend_args=() # as it comes: what is built in
  [[ -z $(git status --porcelain -- server crds Cargo.lock) ]] || commit+=" and changes"
  COMMIT=$commit node $sources/measure.js "${GANTRY_SERVER:-target/release/gantry-server}" "${GANTRY_MODEL:-$model}" "${backend_args[@]}" >"$cache/run.json"
  { echo "// Written by make diagrams from one run: do not edit."
    printf 'window.GANTRY_RUN = %s;\n' "$(<"$cache/run.json")"; } >$pages/run.js
  note "$pages/run.js: look at the pages before you commit it"
}

open_pages() { # the sums go on in the form that hack/test.sh counts
  local status=0
  cp $sources/pages.test.js "$installed/"
  PAGES=$root/$pages BROWSER=$(command -v chromium) node --test --test-reporter=spec "$installed/pages.test.js" >"$cache/diagrams.log" 2>&1 || status=$?
  cat "$cache/diagrams.log"
  awk '/^ℹ pass / {passed = $3} /^ℹ fail / {failed = $3} END {
    printf "test result: %s. %d passed; %d failed\n", failed || !passed ? "FAILED" : "ok", passed, failed}' "$cache/diagrams.log"
  return "$status"
}

d3() {
  mkdir -p $pages/d3
  cp "$installed/node_modules/d3/dist/d3.min.js" "$installed/node_modules/d3/LICENSE" $pages/d3/
}

case ${1:-} in
  '')
    step "Node" node_version
    [[ -n ${GANTRY_SERVER:-} ]] || step "gantry-server" build_binaries
    [[ -n ${GANTRY_MODEL:-} ]] || step "model" hack/models.sh smollm2
    step "measure" measure ;;
  test)
    # As with the client libraries for Node, a machine without it leaves this out.
    has npm || { note "left out: npm is missing"; exit; }
    step "Node" node_version
    step "Chromium" install_packages browser
    step "packages of npm" npm_packages
    step "the pages in Chromium" open_pages ;;
  d3)
    step "Node" node_version
    step "packages of npm" npm_packages
    step "d3" d3 ;;
  *) die "no such command: $1 (test and d3 are there; without one it measures)" ;;
esac
steps_summary
