#!/usr/bin/env bash
# Builds the native core with AddressSanitizer and UndefinedBehaviorSanitizer into a folder of its own, and runs its tests
# against that build. The first read or write out of bounds, or undefined operation, ends the run.
#   tools/sanitizers.sh PYTHON FOLDER
set -euo pipefail
python=${1:?usage: tools/sanitizers.sh PYTHON FOLDER} folder=${2:?}
cd "$(dirname "$0")/.."
site=$folder/site
rm -rf "$site"
export CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
LDFLAGS="-fsanitize=address,undefined" "$python" -m pip install -qq --disable-pip-version-check --no-deps \
  --target "$site" .
[[ $(nm -D "$site"/kvcluster/pages/_native*.so) == *__asan_report* ]] || { echo "the build is not sanitized" >&2; exit 1; }

# The interpreter is not sanitized, so the runtimes are loaded before it; libstdc++ first among the rest, for exceptions.
preload=""
for library in libasan.so libubsan.so libstdc++.so.6; do
  preload+="$(g++ -print-file-name=$library) "
done
echo "==> tests of the native core, sanitized"
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$site \
  "$python" -m pytest -q -n0 --capture=sys -p no:cacheprovider -o pythonpath="$site ." --timeout 900 \
  tests/pages/test_native.py tests/pages/test_checksum.py tests/pages/test_codec.py tests/pages/test_copy_batch.py \
  tests/client/test_native_copies.py
