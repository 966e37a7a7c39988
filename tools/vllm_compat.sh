#!/usr/bin/env bash
# Holds the connector against the vLLM of an environment and against the newest release, unpacked, and sees that the
# table in docs/vllm.md says what came of it.
#   tools/vllm_compat.sh ENVIRONMENT
set -euo pipefail
python=${1:?usage: tools/vllm_compat.sh ENVIRONMENT}/bin/python
cd "$(dirname "$0")/.."
newest=$(tools/vllm_wheel.sh "$PWD/build/vllm-0.33.0" "$python")
for path in "" "$newest"; do
  row=$(PYTHONPATH=$path "$python" -m tests.vllm.compatibility | tail -1)
  echo "$row"
  grep -qF "$row" docs/vllm.md || { echo "the table in docs/vllm.md says otherwise" >&2; exit 1; }
done
