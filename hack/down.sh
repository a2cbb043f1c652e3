#!/usr/bin/env bash
# Undo `make up`: stop the project's cluster and remove its state. In a cluster of the user's own, remove the demo and the
# release; the CRDs stay there, because removing them removes every InferenceService.
source "$(dirname "$0")/lib.sh"

remove_from_foreign() {
  kubectl delete namespace $demo_namespace --ignore-not-found --timeout=120s
  helm uninstall $release --namespace $system_namespace --ignore-not-found --wait
  kubectl delete namespace $system_namespace --ignore-not-found --timeout=120s
  note "the CRDs stay: kubectl delete crd inferenceservices.gantry.dev modelversions.gantry.dev"
}

if is_foreign; then
  use_kubeconfig
  step "remove the demo and the release" remove_from_foreign
else
  step "cluster: stop" "$cluster" down
fi
