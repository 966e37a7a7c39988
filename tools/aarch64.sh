#!/usr/bin/env bash
# Checks the part of the native core that knows nothing of Python against cases that Python writes: on this machine with
# each of its instruction sets, and as built for aarch64, under qemu. Says nothing of speed.
#   tools/aarch64.sh PYTHON FOLDER
set -euo pipefail
python=${1:?usage: tools/aarch64.sh PYTHON FOLDER} folder=${2:?}
cd "$(dirname "$0")/.."
for needed in cmake g++ aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$needed" >/dev/null || {
    echo "there is no $needed here; on Debian: apt-get install cmake make g++ g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  }
done

mkdir -p "$folder"
"$python" -m tests.memory.vectors "$folder/cases"

build() { # FOLDER [CMAKE ARGUMENTS]
  cmake -S native -B "$@" -DKVC_VECTORS=ON >"$1.log" && cmake --build "$1" >>"$1.log" || { cat "$1.log" >&2; exit 1; }
}
build "$folder/here"
"$folder/here/vectors" "$folder/cases"
build "$folder/aarch64" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
qemu-aarch64 -L /usr/aarch64-linux-gnu "$folder/aarch64/vectors" "$folder/cases"
