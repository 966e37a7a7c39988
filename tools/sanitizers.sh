#!/usr/bin/env bash
# Builds the native core with sanitizers into a folder of its own, and runs its tests against that build. The first read
# or write out of bounds, undefined operation or data race ends the run. Two builds, because they exclude each other:
#   memory    AddressSanitizer and UndefinedBehaviorSanitizer
#   threads   ThreadSanitizer
#   tools/sanitizers.sh PYTHON FOLDER [KIND...]
set -euo pipefail
python=${1:?usage: tools/sanitizers.sh PYTHON FOLDER [KIND...]} folder=${2:?}
cd "$(dirname "$0")/.."
kinds=("${@:3}")
[[ ${#kinds[@]} -gt 0 ]] || kinds=(memory threads)
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0

for kind in "${kinds[@]}"; do
  site=$folder/$kind run=()
  case $kind in
    memory)
      flags="-fsanitize=address,undefined -fno-sanitize-recover=all" symbol=__asan_report libraries="libasan.so libubsan.so"
      tests=(tests/memory/test_native.py tests/memory/test_checksum.py tests/memory/test_codec.py
        tests/memory/test_copy_batch.py tests/client/test_native_copies.py tests/fuzz/test_parsers.py
        tests/attention)
      chosen="not test_whatever_comes_in or cop" ;;
    threads)
      flags="-fsanitize=thread" symbol=__tsan_read libraries="libtsan.so"
      tests=(tests/memory/test_native.py tests/memory/test_codec.py tests/client/test_native_copies.py
        tests/attention/test_bits.py)
      # A source that changes while it is copied is a race by design: sums decide what is accepted.
      chosen="not meanwhile"
      # ThreadSanitizer cannot map its shadow where the kernel randomises addresses by more bits than it knows.
      # Nor does it know the barriers of torch's OpenMP, whose threads are not ours.
      run=(env OMP_NUM_THREADS=1 setarch "$(uname -m)" --addr-no-randomize) ;;
    *) echo "there are memory and threads, not $kind" >&2; exit 1 ;;
  esac
  rm -rf "$site"
  echo "==> building the native core for sanitizers of $kind"
  CXXFLAGS="$flags -fno-omit-frame-pointer -g" LDFLAGS=$flags "$python" -m pip install -qq --disable-pip-version-check \
    --no-deps --config-settings=cmake.build-type=RelWithDebInfo --config-settings=install.strip=false --target "$site" .
  [[ $(nm -D "$site"/kvcluster/memory/_native*.so) == *$symbol* ]] || { echo "the build is not sanitized" >&2; exit 1; }

  # The interpreter is not sanitized, so the runtimes are loaded before it; libstdc++ first among the rest, for exceptions.
  preload=""
  for library in $libraries libstdc++.so.6; do
    preload+="$(g++ -print-file-name="$library") "
  done
  echo "==> tests of the native core, under sanitizers of $kind"
  "${run[@]}" env LD_PRELOAD="$preload" PYTHONPATH="$site" \
    "$python" -m pytest -q -n0 --capture=sys -p no:cacheprovider -o pythonpath="$site ." --timeout 900 \
    -k "$chosen" "${tests[@]}"
done
