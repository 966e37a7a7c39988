#!/usr/bin/env bash
# Builds deploy/docker/Dockerfile as root where there is neither a container engine nor a registry: with Debian's buildah,
# on a base that debootstrap makes as debian:bookworm-slim is made. pip's settings (PIP_*) go in; IMAGE_ARGS are more
# arguments of `buildah build`.
#
#     tools/image.sh cpu cuda                     # prints what each image is made of, and leaves nothing
#     tools/image.sh --keep /tmp/images cpu       # the same, and leaves /tmp/images/cpu, its root, and /tmp/images/cpu.json
set -euo pipefail
cd "$(dirname "$0")/.."

for program in buildah debootstrap; do
  command -v "$program" >/dev/null || { echo "there is no $program here; on Debian: apt-get install buildah debootstrap" >&2; exit 1; }
done
((EUID == 0)) || { echo "only root can make a base and build on it" >&2; exit 1; }

if [[ ${1:-} == --keep ]]; then
  mkdir -p "$2"
  folder=$(realpath "$2")
  shift 2
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
targets=("${@:-cpu}")
# vfs: a folder for each layer, and no mounts, so that removing the folder removes everything.
store=(--storage-driver vfs --root "$folder/storage" --runroot "$folder/run")
base=localhost/debian:bookworm-slim

make_base() { # with what the slim image leaves out, now and when packages are installed on it
  local root=$folder/base
  debootstrap --variant=minbase bookworm "$root" >"$folder/debootstrap.log" 2>&1 || { tail "$folder/debootstrap.log" >&2; exit 1; }
  printf 'path-exclude /usr/share/%s/*\n' doc man info locale >"$root/etc/dpkg/dpkg.cfg.d/slim"
  echo 'path-include /usr/share/doc/*/copyright' >>"$root/etc/dpkg/dpkg.cfg.d/slim"
  find "$root/usr/share/doc" ! -type d ! -name copyright -delete
  (cd "$root" && rm -rf usr/share/{man,info,locale}/* var/lib/apt/lists/* var/cache/{apt,debconf}/* var/log/* dev/*)
  local container
  container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" copy -q "$container" "$root" / >/dev/null
  buildah "${store[@]}" commit -q --rm "$container" "$base" >/dev/null
  rm -rf "$root"
}

pip_arguments() { # pip's settings as arguments, one a line; files of this machine lie in /mnt during the build
  local name value
  for name in PIP_FIND_LINKS PIP_CERT; do
    value=${!name:-}
    if [[ -e $value ]]; then
      mkdir -p "$folder/pip"
      cp -rL "$value" "$folder/pip/$name"
      value=/mnt/$name
    fi
    [[ -z $value ]] || printf -- '--build-arg\n%s=%s\n' "$name" "$value"
  done
  [[ ! -d $folder/pip ]] || printf -- '--volume\n%s\n' "$folder/pip:/mnt:ro"
}

show() { # what an image is made of, in MB
  local root=$1
  echo "image $target: $(du -sm "$root" | cut -f1) MB, $(tar -C "$root" -c . | gzip -1 | wc -c | awk '{ printf "%.0f", $1 / 1e6 }') MB compressed"
  du -sm "$root"/{usr,var} "$root"/opt/kvcluster/lib/python3*/site-packages/* | sort -rn | sed -n "1,8s|$root||p"
}

start=$SECONDS
make_base
echo "base: $((SECONDS - start)) s"
mapfile -t arguments < <(pip_arguments)
for target in "${targets[@]}"; do
  start=$SECONDS
  make image ENGINE="buildah ${store[*]}" TARGET="$target" \
    IMAGE_ARGS="--isolation chroot --layers --pull-never --iidfile $folder/$target.id --build-arg BASE=$base ${arguments[*]} ${IMAGE_ARGS:-}" \
    >"$folder/$target.log" 2>&1 || { tail -n 30 "$folder/$target.log" >&2; exit 1; }
  echo "built $target in $((SECONDS - start)) s"
  container=$(buildah "${store[@]}" from --pull-never "$(<"$folder/$target.id")")
  buildah "${store[@]}" inspect "$container" >"$folder/$target.json"
  root=$(buildah "${store[@]}" mount "$container")
  ln -sfn "$root" "$folder/$target"
  show "$root"
done
