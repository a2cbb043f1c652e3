#!/usr/bin/env bash
# From a bare machine to a model that answers: a cluster, the operator, an InferenceService and a question to it.
# Run again it finds everything in place. With KUBECONFIG=file on make's command line it uses that cluster instead.
source "$(dirname "$0")/lib.sh"

manifests=e2e/manifests
question='Which version are you?'
service_url=http://$demo_service.$demo_namespace.svc/v1
ready_timeout=180s

builds_images() { ! is_foreign || [[ -n ${REGISTRY:-} ]]; }

prerequisites() {
  local groups=()
  if builds_images; then require_toolchains; groups+=(build images); fi
  if ! is_foreign; then require_go; groups+=(cluster); fi
  if ((${#groups[@]})); then install_packages "${groups[@]}"; else note "nothing is built: the chart's images are used"; fi
  has jq || die "jq is missing: install it with your package manager"
}

# The image runs on this machine's processor, or on any of a cluster that is elsewhere; VARIANTS chooses others.
cpu_backends() {
  [[ $(uname -m) == x86_64 ]] || { note "what is linked in is all there is for $(uname -m)"; return; }
  if is_foreign; then hack/backends.sh; else VARIANTS=${VARIANTS-native} hack/backends.sh; fi
}

apply() { # apply FILE: server-side, so that what is there already stays as it is
  sed "s#gantry.dev/e2e:dev#$(e2e_image)#" "$manifests/$1" |
    kubectl apply --server-side --field-manager=gantry-demo --namespace $demo_namespace -f - | sed 's/^/    /'
}

# Pods that run keep the server image they have, whatever the operator's is: an upgrade restarts nobody unasked. Here the
# image changed because the checkout did, and what was just built is what should run.
restart_on_new_image() {
  local wanted pods
  # As the operator has it: the chart's values may leave the tag to the chart's version.
  wanted=$(kubectl --namespace $system_namespace get deployment "$release-operator" --output json |
    jq -r '.spec.template.spec.containers[0].env[] | select(.name == "SERVER_IMAGE").value')
  pods=$(kubectl --namespace $demo_namespace get pods --selector "gantry.dev/service=$demo_service" --output json |
    jq -r '.items[].spec.containers[0].image')
  [[ -n $pods ]] && grep -qvxF "$wanted" <<<"$pods" || return 0
  note "restarting the pods with $wanted"
  kubectl --namespace $demo_namespace annotate infs $demo_service --overwrite "gantry.dev/restart=$wanted" >/dev/null
  kubectl --namespace $demo_namespace wait deployment/$demo_service --timeout=$ready_timeout \
    --for="jsonpath={.spec.template.spec.containers[0].image}=$wanted" >/dev/null
  kubectl --namespace $demo_namespace rollout status deployment/$demo_service --timeout=$ready_timeout | tail -1 | sed 's/^/    /'
}

demo() {
  local condition=Ready # it answers, with what its spec asks for
  apply namespace.yaml
  apply models.yaml
  apply prompts.yaml
  # An InferenceService that is there is the user's: its model may have been changed by hand, to one that is refused even.
  if kubectl --namespace $demo_namespace get infs $demo_service >/dev/null 2>&1; then
    note "inferenceservice.gantry.dev/$demo_service is there and left as it is"
    restart_on_new_image
    condition=Available
  else
    apply chat.yaml
  fi
  kubectl --namespace $demo_namespace rollout status deployment/demo-models --timeout=$ready_timeout | tail -1 | sed 's/^/    /'
  kubectl --namespace $demo_namespace wait infs/$demo_service --for=condition=$condition --timeout=$ready_timeout | sed 's/^/    /'
}

demo_or_explain() { (set -e; demo) || { explain_namespace $demo_namespace; return 1; }; }

ask() { # Ready pods come before kube-proxy leads the Service to them: until then its connections are refused
  local answer deadline=$((SECONDS + 30))
  note "> $question"
  until answer=$(kubectl --namespace $demo_namespace exec deployment/demo-models -- \
    gantry-e2e ask --url $service_url --model $demo_service "$question" 2>"$cache/ask.log"); do
    ((SECONDS < deadline)) || { cat "$cache/ask.log" >&2; return 1; }
    sleep 0.5
  done
  printf '%s\n' "$answer" | sed 's/^/    < /'
}

show() { kubectl --namespace $demo_namespace get infs,mv; }

next() {
  local v2=f73e755f3e5ed6e3d835c91079d0ab8a411b098a40a6f9b248bd21036692b365
  local v1=aa5c987d5ead60d56ac6a741a0c316f7408506b1e05b1d1e1c41c95b96c59e54
  local environment="export KUBECONFIG=$KUBECONFIG" down="make down"
  is_foreign && down="make down KUBECONFIG=$FOREIGN_KUBECONFIG" || environment="eval \"\$($cluster env)\""
  patch() {
    echo "kubectl -n $demo_namespace patch infs $demo_service --type merge -p \\"
    echo "    '{\"spec\":{\"model\":{\"source\":{\"uri\":\"http://demo-models.$demo_namespace.svc:8080/$1\",\"sha256\":\"$2\"}}}}'"
  }
  cat <<TEXT

What to type next:

  # the tools and the cluster, for this shell
  $environment

  # ask it something
  kubectl -n $demo_namespace exec deploy/demo-models -- gantry-e2e ask --url $service_url "What is the capital of Peru?"

  # change the model, watch it being checked and switched in, ask again: only the second version knows
  $(patch demo-v2.q8_0.gguf $v2)
  kubectl -n $demo_namespace get mv --watch

  # try one that is broken: it is refused, and the second version goes on answering
  $(patch demo-v3-bad.q8_0.gguf 5267c2f5f0400c9754ab977d6d23f6b3a2c34c2e75625f83ba4d33b38c283576)
  kubectl -n $demo_namespace get mv

  # back to the first version: it is still there, and nothing is downloaded
  $(patch demo-v1.q8_0.gguf $v1)

  $down
TEXT
}

step prerequisites prerequisites
use_kubeconfig
if builds_images; then
  step "binaries (cargo build --release)" build_binaries
  step "CPU backends for the server's image" cpu_backends
fi
if ! is_foreign; then step "cluster: build its binaries" "$cluster" build; step "cluster: start" "$cluster" up; fi
if ! is_foreign; then
  step "images: build and load" hack/images.sh load
elif builds_images; then
  step "images: build and push" hack/images.sh push "$REGISTRY"
fi
step "chart: helm upgrade --install $release" install_chart
step "demo: InferenceService $demo_service with two pods" demo_or_explain
step "ask it through its Service" ask
step "kubectl get infs,mv -n $demo_namespace" show
steps_summary
next
