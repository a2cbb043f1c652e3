#!/usr/bin/env bash
# Build the images from the Dockerfile and the binaries that cargo has built, with buildah: no daemon, no registry.
#
# An image's tag is dev-<hash of what goes into it>, so an image that is there is current, and a changed one rolls the
# Deployments that name it. `gantry.dev/<name>:dev` always means the newest.
#
#   hack/images.sh              build what is missing
#   hack/images.sh load         and import it into the project's cluster
#   hack/images.sh push HOST/PATH      and push it there
#   hack/images.sh tag NAME     print the tag of operator, server or e2e
source "$(dirname "$0")/lib.sh"

names=(operator server e2e)
debian=docker.io/library/debian:bookworm-slim
slim=(--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*'
  --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr --include=usr-is-merged) # without the hook usrmerge comes, and with it perl
host_ca=/etc/ssl/certs/ca-certificates.crt
archive=$cache/image.tar

export BUILDAH_ISOLATION=chroot
image_store() { buildah --root "$cache/containers/storage" --runroot "$cache/containers/run" --storage-driver "$driver" "$@"; }
exists() { image_store inspect --type image "$1" >/dev/null 2>&1; }

choose_driver() { # overlay on overlay does not mount: then layers are copied
  driver=overlay
  image_store info >/dev/null 2>&1 || driver=vfs
}

ensure_debian() { # pulled where Docker Hub can be reached; else made from Debian's archive, as it is made for Docker Hub
  local container
  exists $debian && return
  if [[ $(curl -s --max-time 5 -o "$cache/registry.txt" -w '%{http_code}' https://registry-1.docker.io/v2/) == 401 ]]; then
    image_store pull --quiet $debian && return
  fi
  note "Docker Hub cannot be reached: making $debian with mmdebstrap"
  mmdebstrap --quiet --variant=minbase "${slim[@]}" --include=ca-certificates bookworm "$cache/debian.tar" >"$cache/debian.log" 2>&1 ||
    { tail -20 "$cache/debian.log" >&2; die "mmdebstrap failed, see $cache/debian.log"; }
  container=$(image_store from scratch)
  image_store add --quiet "$container" "$cache/debian.tar" /
  image_store config --cmd bash "$container"
  image_store commit --quiet --rm "$container" $debian
  rm "$cache/debian.tar"
}

inputs() { # what goes into an image, one file a line
  printf '%s\n' Dockerfile .dockerignore "target/release/gantry-$1"
  [[ $1 != server ]] || printf '%s\n' target/backends/*
  [[ $1 != e2e ]] || printf '%s\n' e2e/image/* e2e/models/*.gguf e2e/models/eval.jsonl
}

tag_of() {
  local hash
  # shellcheck disable=SC2046 # no name has a space
  hash=$(sha256sum $(inputs "$1") | sha256sum)
  echo "dev-${hash:0:12}"
}

build_image() {
  local name=$1 tag; tag=gantry.dev/$1:$(tag_of "$1")
  if exists "$tag"; then note "$tag is current"; return; fi
  local secret=()
  [[ ! -s $host_ca ]] || secret=(--secret "id=ca,src=$host_ca")
  image_store build --quiet --layers --pull-never --network host --build-arg BUILD=binaries "${secret[@]}" \
    --target "$name" --tag "$tag" --tag "gantry.dev/$name:dev" . >"$cache/image-$name.log" 2>&1 ||
    { tail -40 "$cache/image-$name.log" >&2; die "gantry.dev/$name: the build failed, see $cache/image-$name.log"; }
  note "$tag: $(size "$tag")"
}

remove_old() { # earlier builds, which nobody asks for again; the layers of packages stay, as a cache
  local current=() name old
  for name in "${names[@]}"; do current+=(-e "gantry.dev/$name:$(tag_of "$name")"); done
  image_store rm --all >/dev/null # of stages that were copied from
  old=$(image_store images --json | jq -r '.[].names[]? | select(startswith("gantry.dev/") and contains(":dev-"))' |
    grep -vxF "${current[@]}" || true)
  old+=" $(image_store images --quiet --filter dangling=true --filter label=dev.gantry.stage=binaries)"
  # shellcheck disable=SC2086 # a list
  [[ -z ${old// /} ]] || image_store rmi --force $old >/dev/null
}

size() { image_store images --json "$1" | jq -r '.[0].size'; }

load_image() { # one image under its two names: Deployments name the tag, tests the newest
  local name=$1 tag
  tag=gantry.dev/$name:$(tag_of "$name")
  if "$cluster" has "$tag"; then
    note "$tag is in the cluster"
  else
    rm -f "$archive"
    image_store push --quiet "$tag" "docker-archive:$archive:$tag"
    "$cluster" load "$archive" 2>/dev/null
    rm -f "$archive"
    note "$tag"
  fi
  "$cluster" tag "$tag" "gantry.dev/$name:dev"
}

push_image() {
  local name=$1 tag target
  tag=$(tag_of "$name") target=$registry/$1:$(tag_of "$1")
  image_store push --quiet ${REGISTRY_TLS_VERIFY:+--tls-verify="$REGISTRY_TLS_VERIFY"} "gantry.dev/$name:$tag" "docker://$target"
  note "$target"
}

for name in "${names[@]}"; do
  [[ -x target/release/gantry-$name ]] || die "target/release/gantry-$name is missing: cargo build --release --workspace --bins"
done
prepare_backends >&2
case ${1:-build} in
  tag) tag_of "${2:?operator, server or e2e}"; exit ;;
  build | load | push) ;;
  *) sed -n '2,11p' "$0" | cut -c3-; exit 2 ;;
esac
choose_driver
ensure_debian
for name in "${names[@]}"; do build_image "$name"; done
remove_old
case ${1:-build} in
  load) for name in "${names[@]}"; do load_image "$name"; done ;;
  push) registry=${2:?a registry, e.g. registry.example.com/gantry}; for name in "${names[@]}"; do push_image "$name"; done ;;
esac
