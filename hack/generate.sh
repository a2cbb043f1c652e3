#!/usr/bin/env bash
# Write the CRDs from the Rust types to crds/yaml, and the copies of them that the chart installs.
source "$(dirname "$0")/lib.sh"

cargo run --release --locked --quiet -p gantry-crds --bin crdgen
rm -f charts/gantry/files/crds/*.yaml
mkdir -p charts/gantry/files/crds
cp crds/yaml/*.yaml charts/gantry/files/crds/
