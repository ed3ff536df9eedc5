#!/usr/bin/env bash
# The kernels and their binding under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
#
#   tests/sanitize.sh          short form for CI: twenty seconds of random calls, and the tests of the kernels
#   tests/sanitize.sh long     eight minutes of them, and more tests
#
# Needs g++ (or CXX) with its sanitizers, and a python (or PYTHON) with nanobind and what the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

form=${1:-short}
case $form in
    short) seconds=5 tests="order/test_packing data/test_gather" ;;
    long) seconds=120 tests="order/test_packing data/test_gather order/test_plan order/test_balance order/test_stream data/test_collate" ;;
    *) echo "usage: $0 [short|long]" >&2; exit 2 ;;
esac
cxx=${CXX:-g++}
python=${PYTHON:-python}
build=${BUILD:-build/sanitize}
seed=${SEED:-$(date +%j)} # another one every day, said below so that a fault can be found again
log=$build/log
kernels="bounds checks packing permute search stream gather"

nanobind=$($python -c 'import nanobind; print(nanobind.include_dir())')
includes="-Icsrc -I$nanobind -I$nanobind/../ext/robin_map/include"
includes+=" -I$($python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"

# build NAME FLAGS: the fuzz target and the extension module, their files compiled two at a time.
build() {
    local out=$build/$1 flags="-std=c++20 -O1 -g -fno-omit-frame-pointer -fPIC -fvisibility=hidden -pthread $2"
    mkdir -p "$out"
    local sources=(tests/fuzz/{fuzz,fuzz_packing,fuzz_gather}.cpp csrc/bindings.cpp "$nanobind/../src/nb_combined.cpp")
    for kernel in $kernels; do sources+=("csrc/$kernel.cpp"); done
    printf '%s\n' "${sources[@]}" | xargs -P 2 -I{} sh -c "$cxx $flags $includes -c {} -o $out/\$(basename {} .cpp).o"
    local objects=()
    for kernel in $kernels; do objects+=("$out/$kernel.o"); done
    $cxx $flags "$out"/fuzz{,_packing,_gather}.o "${objects[@]}" -o "$out/fuzz"
    $cxx $flags -shared "$out/bindings.o" "$out/nb_combined.o" "${objects[@]}" -o "$out/_core.so"
}

# The sanitizer must be the first library of an interpreter that was built without it, and know the C++ library's exceptions.
preload() { echo "$($cxx -print-file-name="$1") $($cxx -print-file-name=libstdc++.so.6)"; }

echo "sanitize: $form form, seed $seed"
build address "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
build thread "-fsanitize=thread"

# Memory that is still held at the end: the whole of the C++ program, and what the module holds for Python, which
# says so itself; Python's own is left out.
export ASAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
run() { "$@" 2>&1 | tee -a "$log"; }

: > "$log"
run "$build/address/fuzz" "$seconds" "$seed"
run "$build/thread/fuzz" "$seconds" "$seed" 4
export ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0
run env LD_PRELOAD="$(preload libasan.so)" $python tests/fuzz/fuzz_core.py "$build/address/_core.so" "$seconds" "$seed"
run env LD_PRELOAD="$(preload libtsan.so)" $python tests/fuzz/fuzz_core.py "$build/thread/_core.so" "$seconds" "$seed"
run env SANITIZED_CORE="$build/address/_core.so" PYTHONPATH=tests/fuzz LD_PRELOAD="$(preload libasan.so)" \
    $python -m pytest -q -p sanitized_core $(printf 'tests/%s.py ' $tests)
if grep "nanobind: leaked" "$log"; then exit 1; fi
sum() { grep -oE "[0-9]+ $1" "$log" | awk '{ n += $1 } END { print n }'; }
echo "sanitize: $(sum '(cases|calls) held') inputs answered, $(sum 'were refused') refused, $(sum passed) tests" \
    "under AddressSanitizer with UndefinedBehaviorSanitizer and ThreadSanitizer, seed $seed: nothing found"
