#!/usr/bin/env bash
# Puts SGLang's sources where tests can read them: its wheel, unpacked, and the two small packages that its storage
# interface and host pools import. Nothing of it is installed. What is there already is kept. Prints the folder.
#   tools/sglang_wheel.sh DIR [PYTHON]
set -euo pipefail
dir=${1:?usage: tools/sglang_wheel.sh DIR [PYTHON]}
python=${2:-python3}
sglang=0.5.23

mkdir -p "$(dirname "$dir")"
exec 9> "$dir.lock"
flock 9 # tests that run at the same time ask for it at the same time
if [ ! -e "$dir/.complete" ]; then
  made=$(mktemp -d "$dir.XXXXXX")
  trap 'rm -rf "$made"' EXIT
  pip() { "$python" -m pip "$1" -qq --disable-pip-version-check --no-deps "${@:2}"; }
  # Its Python sources are all that is used, so it may be the wheel of another Python or platform than this one.
  pip download --dest "$made" --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 \
    --platform manylinux_2_34_x86_64 "sglang==$sglang" >&2
  "$python" -m zipfile -e "$made"/sglang-*.whl "$made"
  rm "$made"/sglang-*.whl
  pip install --no-compile --target "$made/with" msgspec==0.22.0 psutil==7.2.2 >&2
  touch "$made/.complete"
  rm -rf "$dir"
  mv "$made" "$dir"
  trap - EXIT
fi
echo "$dir"
