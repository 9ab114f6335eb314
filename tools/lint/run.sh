#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Lints the tree: tools/lint/run.sh [--fix] [CHECK ...]. Without names every check runs, and all failures are shown.
#
# Checks: ruff format mypy clang-format clang-tidy buildifier text docs flags. --fix lets ruff, clang-format and
# buildifier write. clang-tidy is Debian's clang-tidy-19, or what TOKENSPEED_CLANG_TIDY names.
# Python tools come from the locked wheels through Bazel; TOKENSPEED_LINT_PYTHON names an interpreter that has them
# instead. clang-format (PyPI) and buildifier (npm) are fetched once, by hash, into the user's cache.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${TOKENSPEED_LINT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tokenspeed/lint}
BUILDIFIER=8.2.1
BUILDIFIER_SHA512=799fc0abedabe0f7096ba2db3c24fa7df80825f4d4fe062296a233a17d8e2cce273646d00bab5330f64d9fb6871e38463f16cd2efe35ce6e17aadd689422e05f

all=(ruff format mypy clang-format clang-tidy buildifier text docs flags)
fix=
checks=()
for word in "$@"; do
  case $word in
    --fix) fix=1 ;;
    *) checks+=("$word") ;;
  esac
done
[ ${#checks[@]} -gt 0 ] || checks=("${all[@]}")

# Tracked files and new ones that are not ignored, by glob; deleted ones left out.
files() { git ls-files -z --cached --others --exclude-standard -- "$@" | xargs -0 -r ls -d 2>/dev/null || true; }

python_tool() { # module args...
  if [ -n "${TOKENSPEED_LINT_PYTHON:-}" ]; then
    "$TOKENSPEED_LINT_PYTHON" tools/lint/tool.py "$@"
  else
    tools/bazel run --ui_event_filters=-info --noshow_progress --experimental_convenience_symlinks=ignore \
      //tools/lint:tool -- "$@"
  fi
}

clang_format() {
  local folder=$cache/clang-format-$(sha256sum tools/lint/clang-format.txt | cut -c1-12)
  if [ ! -x "$folder/clang_format/data/bin/clang-format" ]; then
    echo "lint: fetching clang-format" >&2
    "${TOKENSPEED_PYTHON:-python3}" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: \
      --require-hashes --root-user-action=ignore --target "$folder" -r tools/lint/clang-format.txt 2> >(grep -v "is ignored" >&2 || true)
  fi
  "$folder/clang_format/data/bin/clang-format" "$@"
}

clang_tidy() { # files... : .clang-tidy says what for
  local tool=${TOKENSPEED_CLANG_TIDY:-clang-tidy-19}
  command -v "$tool" >/dev/null || { echo "lint: no $tool: install the Debian package clang-tidy-19" >&2; return 1; }
  printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" sh -c '"$0" --quiet "$1" -- -std=c++20 -I. 2>/dev/null' "$tool"
}

buildifier() {
  if [ ! -d "$cache/buildifier-$BUILDIFIER/package" ]; then
    command -v npm >/dev/null || { echo "lint: buildifier comes from npm: install the Debian package npm" >&2; return 1; }
    echo "lint: fetching buildifier $BUILDIFIER" >&2
    local work
    work=$(mktemp -d)
    (cd "$work" && npm pack --silent "@bazel/buildifier@$BUILDIFIER" >/dev/null)
    echo "$BUILDIFIER_SHA512  $(ls "$work"/*.tgz)" | sha512sum --quiet -c -
    mkdir -p "$cache/buildifier-$BUILDIFIER"
    tar -xzf "$work"/*.tgz -C "$cache/buildifier-$BUILDIFIER"
    rm -rf "$work"
  fi
  local arch=amd64
  [ "$(uname -m)" != aarch64 ] || arch=arm64
  local binary=$cache/buildifier-$BUILDIFIER/package/buildifier-linux_$arch
  chmod +x "$binary"
  "$binary" "$@"
}

run_check() {
  case $1 in
    ruff) if [ -n "$fix" ]; then python_tool ruff check --fix .; else python_tool ruff check .; fi ;;
    format) if [ -n "$fix" ]; then python_tool ruff format .; else python_tool ruff format --check .; fi ;;
    mypy) python_tool mypy --config-file pyproject.toml python kernels cc protos tools tests ;;
    clang-format)
      local sources
      mapfile -t sources < <(files '*.cc' '*.h' '*.cu' '*.cuh')
      if [ ${#sources[@]} -eq 0 ]; then return 0; fi
      if [ -n "$fix" ]; then clang_format -i "${sources[@]}"; else clang_format --dry-run --Werror "${sources[@]}"; fi
      ;;
    clang-tidy)
      # Tests need googletest's headers and the bindings pybind11's and Python's, which only Bazel has.
      local units
      mapfile -t units < <(files 'cc/*.cc' ':!cc/*_test.cc' ':!cc/bindings/*')
      clang_tidy "${units[@]}"
      ;;
    buildifier)
      local builds
      mapfile -t builds < <(files '*.bazel' '*.bzl')
      if [ -n "$fix" ]; then buildifier -mode=fix "${builds[@]}"; else buildifier -mode=check "${builds[@]}"; fi
      ;;
    text) "${TOKENSPEED_PYTHON:-python3}" tools/lint/text_checks.py ;;
    docs) "${TOKENSPEED_PYTHON:-python3}" tools/lint/dead_names.py ;;
    flags) "${TOKENSPEED_PYTHON:-python3}" tools/docs/flags.py --check ;;
    *)
      echo "lint: no check is named $1 (there are: ${all[*]})" >&2
      return 2
      ;;
  esac
}

failed=()
for check in "${checks[@]}"; do
  # Not `if run_check`: that would switch errexit off inside it.
  set +e
  (set -e; run_check "$check")
  status=$?
  set -e
  if [ $status -eq 0 ]; then echo "lint: $check ok"; else failed+=("$check"); echo "lint: $check FAILED" >&2; fi
done
[ ${#failed[@]} -eq 0 ] || { echo "lint: failed: ${failed[*]}" >&2; exit 1; }
