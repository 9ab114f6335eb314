#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Rewrites the locks of this folder from their sources:
#   tools/locks/refresh.sh [cpu] [cuda] [toolkit] [peers] [debian]     (all of them without arguments)
#   tools/locks/refresh.sh --upgrade cpu                       newest versions instead of the locked ones
# Python locks are resolved by pip-tools for Python 3.11 on x86-64 Linux; Debian locks take the suite's present versions.
# The CPU lock needs the torch+cpu wheel in pip's reach: PIP_FIND_LINKS, or PyTorch's CPU index (see README.md here).
set -euo pipefail
cd "$(dirname "$0")"

python=${TOKENSPEED_PYTHON:-python3.11}
upgrade=
[ "${1:-}" != --upgrade ] || { upgrade=--upgrade; shift; }
[ $# -gt 0 ] || set -- cpu cuda toolkit peers debian

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT

compile() {  # name, first lines of the lock
  [ -d "$tools/site" ] || "$python" ../debian/run_pip.py install --quiet --target "$tools/site" 'pip<26' pip-tools==7.6.2
  local new=$tools/$1.txt
  [ -n "$upgrade" ] || grep -v '^-' "$1.txt" > "$new" || true
  CUSTOM_COMPILE_COMMAND="tools/locks/refresh.sh $1" PYTHONPATH=$tools/site "$python" -m piptools compile --quiet $upgrade \
    --allow-unsafe --generate-hashes --no-strip-extras --no-emit-find-links --no-emit-index-url --annotation-style=line \
    --output-file "$new" "$1.in"
  { printf '%s' "$2"; sed 's/ *# via.*$//' "$new" | grep -v '^#' | grep -v '^ *$'; } > "$1.txt"
  grep -q '^[a-z]' "$1.txt"
}

closed() {  # name: a lock of exactly the packages that its .in lists, without what they depend on
  "$python" ../debian/run_pip.py download --quiet --no-deps --only-binary=:all: --dest "$tools/$1" -r "$1.in"
  { echo "# Written by tools/locks/refresh.sh $1."; "$python" - "$tools/$1" <<'PY'; } > "$tools/$1.txt"
import hashlib, pathlib, sys
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    name, version = wheel.name.split("-")[:2]
    print(f"{name.replace('_', '-')}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
PY
  mv "$tools/$1.txt" "$1.txt"
}

for part; do
  echo "refreshing $part" >&2
  case $part in
    cpu) compile cpu $'# Written by tools/locks/refresh.sh cpu; torch+cpu is not on PyPI, so a second index is named.\n--extra-index-url https://download.pytorch.org/whl/cpu\n' ;;
    cuda | toolkit) compile "$part" "# Written by tools/locks/refresh.sh $part."$'\n' ;;
    peers) closed peers ;;
    debian) for lock in googletest image_base pip python_headers; do "$python" ../debian/fetch.py "$lock.json" --refresh; done ;;
    *) echo "usage: tools/locks/refresh.sh [--upgrade] [cpu] [cuda] [toolkit] [peers] [debian]" >&2; exit 2 ;;
  esac
done
