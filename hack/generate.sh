#!/usr/bin/env bash
# Write the CRDs from the Rust types to crds/yaml, and the copies of them that the chart installs.
source "$(dirname "$0")/lib.sh"

# --workspace: a single package would resolve other features, and compile the dependencies once more for them.
cargo build --release --locked --quiet --workspace --bin crdgen
target/release/crdgen crds/yaml
rm -f charts/gantry/files/crds/*.yaml
mkdir -p charts/gantry/files/crds
cp crds/yaml/*.yaml charts/gantry/files/crds/
