#!/usr/bin/env bash
# Unpacks a release of vLLM, its official wheel for GPUs, so that its interfaces can be imported and held against the
# connector: nothing is installed, and no engine runs of it. What is there is kept. Prints the folder.
#   tools/vllm_wheel.sh DIR PYTHON [VERSION]
set -euo pipefail
dir=${1:?usage: tools/vllm_wheel.sh DIR PYTHON [VERSION]}
python=${2:?the interpreter of the environment that tools/vllm_env.sh has built}
version=${3:-0.33.0}

mkdir -p "$(dirname "$dir")"
exec 9> "$dir.lock"
flock 9 # tests that run at the same time ask for it at the same time
if [ ! -e "$dir/.complete" ]; then
  made=$(mktemp -d "$dir.XXXXXX")
  trap 'rm -rf "$made"' EXIT
  "$python" -m pip download -qq --disable-pip-version-check --no-deps --dest "$made" "vllm==$version" >&2
  "$python" -m zipfile -e "$made"/vllm-*.whl "$made"
  rm "$made"/vllm-*.whl
  touch "$made/.complete"
  rm -rf "$dir"
  mv "$made" "$dir"
  trap - EXIT
fi
echo "$dir"
