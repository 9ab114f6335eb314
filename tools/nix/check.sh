#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Evaluates flake.nix to the last derivation, without nixpkgs and without building: tools/nix/check.sh
#
# First the flake as it is must pass, then each of a list of mistakes must be found, by the message that names it:
# a check that lets a misspelt name through would be worth nothing. On Debian, nix-bin is installed when it is missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! command -v nix >/dev/null; then
  install=(apt-get install -y -q --no-install-recommends nix-bin)
  [ "$(id -u)" -eq 0 ] || install=(sudo -n "${install[@]}")
  echo "nix check: installing the Debian package nix-bin" >&2
  "${install[@]}" >/dev/null || { echo "nix check: install Nix first (Debian: apt-get install nix-bin)" >&2; exit 1; }
fi

# One user, no daemon, nothing from the network.
export NIX_CONFIG='experimental-features = nix-command flakes
sandbox = false
build-users-group =
substituters =
flake-registry ='

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# evaluate FOLDER: what `nix flake check` says about the flake there; its status is that of the check.
evaluate() {
  nix flake check --no-build --no-write-lock-file --override-input nixpkgs "path:$1/tools/nix/nixpkgs-stub" "path:$1" 2>&1
}

# A copy of what the evaluation reads: the whole tree would be hashed otherwise. flake.lock stays out: the stub takes
# the place of what it locks, and Nix before 2.15 cannot read a tarball's revision in it.
copy() {
  mkdir -p "$1/tools/nix"
  cp flake.nix "$1/"
  cp -r tools/nix/nixpkgs-stub "$1/tools/nix/"
}

python3 tools/nix/check_lock.py flake.nix flake.lock
nix-instantiate --parse flake.nix >/dev/null
copy "$work/good"
output=$(evaluate "$work/good") || { echo "$output" >&2; echo "nix check: flake.nix does not evaluate" >&2; exit 1; }
for attribute in packages.x86_64-linux.{engine,gateway,engine-image,gateway-image,default} devShells.x86_64-linux.{default,ci}; do
  nix eval --raw --no-write-lock-file --override-input nixpkgs "path:$work/good/tools/nix/nixpkgs-stub" \
    "path:$work/good#$attribute.drvPath" >/dev/null 2>"$work/error" \
    || { cat "$work/error" >&2; echo "nix check: the flake has no $attribute" >&2; exit 1; }
done

# must_fail MESSAGE FROM TO: the flake with FROM replaced by TO fails, and says MESSAGE.
must_fail() {
  local folder
  folder=$(mktemp -d "$work/bad.XXXX")
  copy "$folder"
  sed "s|$2|$3|" flake.nix > "$folder/flake.nix"
  ! cmp -s flake.nix "$folder/flake.nix" || { echo "nix check: flake.nix no longer contains $2" >&2; exit 1; }
  if output=$(evaluate "$folder"); then
    echo "nix check: $2 -> $3 was not noticed" >&2
    exit 1
  fi
  grep -q "$1" <<<"$output" || { echo "$output" >&2; echo "nix check: $2 -> $3 failed without saying: $1" >&2; exit 1; }
}
must_fail "attribute 'bazelisck' missing" pkgs.bazelisk pkgs.bazelisck
must_fail "attribute 'cudaPackages_31' missing" pkgs.cudaPackages_13 pkgs.cudaPackages_31
must_fail "attribute 'torhc' missing" ps.torch ps.torhc
must_fail "attribute 'getAttrs' missing" lib.genAttrs lib.getAttrs
must_fail "buildLayeredImage: unknown argument contentz" "contents = " "contentz = "
must_fail "buildLayeredImage config: unknown argument ExposedPort" ExposedPorts ExposedPort
must_fail "writeShellApplication: unknown argument runtimeInput" "runtimeInputs = " "runtimeInput = "
must_fail "mkShell: missing argument packages" "packages = ciTools pkgs;" ""
must_fail "mkDerivation: wrong type of argument buildPhase" "buildPhase = ''" "buildPhase = [ ]; checkPhase = ''"
must_fail "needs config.allowUnfree" "config.allowUnfree = true;" "config.allowUnfree = false;"
echo "nix check: flake.nix evaluates against the stub, and 10 mistakes are found"
