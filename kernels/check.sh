#!/bin/sh
# Builds every kernel with the C++ compiler and the CPU shim and runs its test; then takes each barrier out in turn and wants
# the test to fail, which shows that it would. With nvcc (NVCC, or on PATH) also compiles for sm_80 and sm_90; runs nothing
# on a GPU. Needs a C++17 compiler (CXX, default c++) and about half a minute.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cxx=${CXX:-c++}
# No contraction: the order and rounding of every operation are part of what is tested.
flags="-std=c++17 -O2 -Wall -Wextra -Werror -ffp-contract=off -I ."

build() { # kernel source, output
    $cxx $flags -x c++ "$1" tests/paged_decode_attention.cpp -o "$2"
}

build paged_decode_attention.cu "$work/test"
"$work/test"

for line in $(grep -n '__syncthreads();' paged_decode_attention.cu | cut -d: -f1); do
    sed "${line}d" paged_decode_attention.cu >"$work/mutant.cu"
    build "$work/mutant.cu" "$work/mutant"
    if "$work/mutant" >"$work/log" 2>&1; then
        echo "FAILED: the test does not notice that the barrier of line $line is missing"
        exit 1
    fi
    echo "without the barrier of line $line: caught"
done

nvcc=${NVCC:-$(command -v nvcc || true)}
if [ -z "$nvcc" ]; then
    echo "SKIPPED: no nvcc, not compiled for a GPU"
    exit 0
fi
for arch in 80 90; do
    "$nvcc" -std=c++17 -arch=sm_$arch -Xptxas -v -c paged_decode_attention.cu -o "$work/sm_$arch.o" 2>"$work/log" || {
        cat "$work/log"
        exit 1
    }
    echo "sm_$arch: $(grep -o 'Used [0-9]* registers' "$work/log" | sort -u | tr '\n' ' ')"
    if grep -q '[1-9][0-9]* bytes spill' "$work/log"; then
        echo "FAILED: registers spill on sm_$arch"
        exit 1
    fi
done
