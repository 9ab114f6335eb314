#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Builds the native parts in place, for work without Bazel: a C++ compiler and a Python are enough, no network.
#   tools/build_native.sh          cc and cpu
#   tools/build_native.sh cc       cc/bindings/tokenspeed_cc.so              (the scheduler module)
#   tools/build_native.sh cpu      kernels/tokenspeed_kernel/_cpu.so         (the CPU kernels)
#   tools/build_native.sh cuda     kernels/**/csrc/cuda/*.fatbin             (needs nvcc)
# Environment: PYTHON (python3), CXX (g++), NVCC (nvcc), JOBS (2), BUILD_DIR (build/native), CUDA_ARCHS.
# Only what changed is compiled again. pybind11's headers come from its package, else from the copy in torch.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
cxx=${CXX:-g++}
jobs=${JOBS:-2}
build=${BUILD_DIR:-build/native}
version_flags="$("$cxx" --version | head -1)|$("$python" -V)"

includes() {
  "$python" - <<'PY'
import importlib.util
import pathlib
import sys
import sysconfig

paths = [sysconfig.get_path("include")]
if not (pathlib.Path(paths[0]) / "Python.h").exists():
    sys.exit(f"build_native: {paths[0]}/Python.h is missing: install this Python's development headers")
for package, folder in (("pybind11", "include"), ("torch", "include")):
    spec = importlib.util.find_spec(package)
    root = pathlib.Path(spec.origin).parent / folder if spec and spec.origin else None
    if root and (root / "pybind11" / "pybind11.h").exists():
        paths.append(str(root))
        break
else:
    sys.exit("build_native: neither pybind11 nor torch is installed, so there are no pybind11 headers")
print(" ".join(f"-isystem {p}" for p in paths))
PY
}

isa_flags() {  # the instruction set that a file name names
  case $1 in
    *_avx512.cc) echo "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512" ;;
    *_avx2.cc) echo "-mavx2 -mfma -mf16c" ;;
  esac
}

stale() {  # object, command: is there anything newer than the object?
  local object=$1 command=$2 dep
  [ -f "$object" ] && [ -f "$object.cmd" ] && [ "$(cat "$object.cmd")" = "$command" ] || return 0
  for dep in $(sed 's/^[^:]*://; s/\\$//' "${object%.o}.d"); do
    [ -f "$dep" ] && [ ! "$dep" -nt "$object" ] || return 0
  done
  return 1
}

compile_queue() {  # file of (command, object, key), what it makes: runs the commands, as many at once as JOBS
  local queue=$1 made=$2
  [ ! -s "$queue" ] || xargs -0 -n 3 -P "$jobs" sh -c \
    'echo "compile ${1##*/}" >&2; rm -f "$1.cmd"; eval "$0" && printf %s "$2" > "$1.cmd"' < "$queue" \
    || { rm -f "$queue"; echo "build_native: $made failed" >&2; exit 1; }
  rm -f "$queue"
}

module() {  # out, common flags, sources...
  local out=$1 flags=$2 source object command relink= objects=()
  shift 2
  local queue=$build/queue.$$
  mkdir -p "$build"
  : > "$queue"
  for source in "$@"; do
    object=$build/${source//\//__}.o
    command="$cxx $flags $(isa_flags "$source") -MMD -c $source -o $object"
    objects+=("$object")
    if stale "$object" "$command|$version_flags"; then
      relink=1
      printf '%s\0%s\0%s\0' "$command" "$object" "$command|$version_flags" >> "$queue"
    fi
  done
  compile_queue "$queue" "$out"
  if [ -n "$relink" ] || [ ! -f "$out" ] || [ "$(cat "$build/${out//\//__}.inputs" 2>/dev/null)" != "${objects[*]}" ]; then
    echo "link $out" >&2
    "$cxx" -shared -o "$out.tmp" "${objects[@]}" -pthread -Wl,-Bsymbolic
    mv "$out.tmp" "$out"
    echo "${objects[*]}" > "$build/${out//\//__}.inputs"
  fi
}

sources() {  # folders... : every .cc that goes into a module
  find "$@" -name '*.cc' ! -name '*_test.cc' ! -path 'cc/testing/*' ! -path 'cc/bench/*' | LC_ALL=C sort
}

common="-std=c++20 -O2 -g1 -fPIC -fvisibility=hidden -fexceptions -Wall -Wextra -pthread -I. $(includes)"

build_cc() {
  mapfile -t files < <(sources cc)
  module cc/bindings/tokenspeed_cc.so "$common" "${files[@]}"
}

build_cpu() {
  mapfile -t files < <(sources kernels/tokenspeed_kernel/csrc/cpu)
  module kernels/tokenspeed_kernel/_cpu.so "${common/-O2/-O3 -ffp-contract=off}" "${files[@]}"
}

build_cuda() {
  local nvcc=${NVCC:-nvcc} arch gencode= source out object command
  command -v "$nvcc" >/dev/null || { echo "build_native: no $nvcc: put the CUDA toolkit's bin folder on PATH or set NVCC" >&2; exit 1; }
  for arch in ${CUDA_ARCHS:-sm_80 sm_90a sm_100}; do gencode+=" -gencode=arch=compute_${arch#sm_},code=$arch"; done
  local queue=$build/queue.$$ key
  key="$("$nvcc" --version | tail -1)"
  mkdir -p "$build"
  : > "$queue"
  while read -r source; do
    out=${source%.cu}.fatbin
    object=$build/${source//\//__}.fatbin
    command="$nvcc --fatbin -std=c++17 -O3 -I.$gencode -MD -MF $object.d -o $object $source"
    if [ ! -f "$out" ] || stale "$object" "$command|$key"; then
      printf '%s\0%s\0%s\0' "$command && mv $object $out && touch $object" "$object" "$command|$key" >> "$queue"
    fi
  done < <(find kernels -path '*/csrc/cuda/*.cu' | LC_ALL=C sort)
  compile_queue "$queue" "csrc/cuda"
}

[ $# -gt 0 ] || set -- cc cpu
for part; do
  case $part in
    cc | cpu | cuda) "build_$part" ;;
    *) echo "usage: tools/build_native.sh [cc|cpu|cuda]..." >&2; exit 2 ;;
  esac
done
