# SPDX-License-Identifier: MIT
"""Downloads locked Debian packages without root and without touching this machine's package lists.

    fetch.py LOCK.json OUT [--unpack]     download (and unpack) what LOCK.json names into OUT
    fetch.py LOCK.json --refresh          rewrite LOCK.json with the suite's present versions and hashes

A lock is {"suite": "bookworm", "packages": [{"package", "version", "sha256"}, ...]}. A file is taken from the folder
TOKENSPEED_DEBS names if it is there, else from Debian's archive, whose signatures apt
checks. A version that a security update has retired is an error, unless TOKENSPEED_DEBS_RETIRED=update allows the
version that replaced it: apt has checked its signature, and the change is reported.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NoReturn

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def fail(message: str) -> NoReturn:
    sys.exit(f"fetch: {message}")


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def mirror() -> str:
    """The Debian archive that this machine's apt uses; TOKENSPEED_DEBIAN_MIRROR names another."""
    if chosen := os.environ.get("TOKENSPEED_DEBIAN_MIRROR"):
        return chosen.rstrip("/")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    for line in listed:
        uri, _, label = line.partition(" ")
        if label == "Debian Debian":
            return uri.rstrip("/")
    fail("no Debian archive in this machine's apt sources: set TOKENSPEED_DEBIAN_MIRROR to one")


class PrivateApt:
    """apt with its own lists, for one suite, in a temporary folder."""

    def __init__(self, suite: str, root: pathlib.Path) -> None:
        for name in ("etc/apt.conf.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "status").touch()
        base = mirror()
        security = base[: -len("debian")] + "debian-security" if base.endswith("/debian") else base
        signed = f"[signed-by={KEYRING}]" if os.path.exists(KEYRING) else ""
        (root / "etc/sources.list").write_text(
            f"deb {signed} {base} {suite} main\n"
            f"deb {signed} {base} {suite}-updates main\n"
            f"deb {signed} {security} {suite}-security main\n"
        )
        for path in pathlib.Path("/etc/apt/apt.conf.d").glob("*"):
            shutil.copy(path, root / "etc/apt.conf.d")
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        settings = {
            "Dir::Etc": root / "etc",
            "Dir::State": root / "state",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "APT::Sandbox::User": user,
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        self.options = [f"-o{key}={value}" for key, value in settings.items()]
        update = self.run("apt-get", "update")
        if update.returncode:
            fail(f"apt could not read the package lists of {suite} from {base}:\n{update.stderr}")

    def run(self, tool: str, *arguments: str, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tool, "-q", *self.options, *arguments], cwd=cwd, capture_output=True, text=True)

    def candidate(self, package: str) -> str:
        for line in self.run("apt-cache", "policy", package).stdout.splitlines():
            if "Candidate:" in line:
                return line.split()[1]
        fail(f"the suite has no package {package}")


def file_of(folder: pathlib.Path, package: str, version: str) -> pathlib.Path | None:
    found = sorted(folder.glob(f"{package}_{version.replace(':', '%3a')}_*.deb"))
    return found[0] if found else None


def present(folder: pathlib.Path, package: str, version: str) -> pathlib.Path:
    """file_of() for a file that a successful download must have left."""
    return file_of(folder, package, version) or fail(f"apt left no file of {package} {version}")


class Fetcher:
    """Brings the packages of one lock into a folder, from the nearest place that has them."""

    def __init__(self, lock: dict, out: pathlib.Path, work: pathlib.Path) -> None:
        self.suite, self.packages, self.out, self.work = lock["suite"], lock["packages"], out, work
        self._apt: PrivateApt | None = None

    @property
    def apt(self) -> PrivateApt:
        if self._apt is None:
            self._apt = PrivateApt(self.suite, self.work)
        return self._apt

    def missing(self) -> list[dict]:
        return [p for p in self.packages if file_of(self.out, p["package"], p["version"]) is None]

    def from_folder(self, folder: pathlib.Path) -> None:
        for p in self.missing():
            if (found := file_of(folder, p["package"], p["version"])) and sha256(found) == p["sha256"]:
                shutil.copy(found, self.out)

    def from_archive(self) -> None:
        """First this machine's own lists, which are often fresh enough; then private ones."""
        for own in (True, False):
            wanted = [f"{p['package']}={p['version']}" for p in self.missing()]
            if wanted and own:
                command = ["apt-get", "-q", "-oAPT::Sandbox::User=root", "download", *wanted]
                subprocess.run(command, cwd=self.out, capture_output=True)
            elif wanted and self.apt.run("apt-get", "download", *wanted, cwd=self.out).returncode:
                for one in wanted:  # one retired version must not hide the others
                    self.apt.run("apt-get", "download", one, cwd=self.out)

    def replace_retired(self) -> None:
        retired = self.missing()
        names = ", ".join(f"{p['package']} {p['version']}" for p in retired)
        if retired and os.environ.get("TOKENSPEED_DEBS_RETIRED") != "update":
            fail(
                f"not in Debian's archive any more: {names}. Refresh the lock (tools/locks/refresh.sh debian), or set "
                "TOKENSPEED_DEBS_RETIRED=update to take the versions that replaced them"
            )
        for p in retired:
            version = self.apt.candidate(p["package"])
            done = self.apt.run("apt-get", "download", f"{p['package']}={version}", cwd=self.out)
            if done.returncode:
                fail(f"{p['package']}={version}: {done.stderr}")
            print(f"fetch: {p['package']} {p['version']} is retired, taking {version}", file=sys.stderr)
            p.update(version=version, sha256=sha256(present(self.out, p["package"], version)))

    def run(self) -> None:
        if folder := os.environ.get("TOKENSPEED_DEBS"):
            self.from_folder(pathlib.Path(folder))
        self.from_archive()
        self.replace_retired()
        for p in self.packages:
            path = present(self.out, p["package"], p["version"])
            if (found := sha256(path)) != p["sha256"]:
                fail(f"{path.name}: sha256 is {found}, the lock says {p['sha256']}")
            path.rename(self.out / f"{p['package']}.deb")


def refresh(path: pathlib.Path) -> None:
    lock = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as work:
        out = pathlib.Path(work, "out")
        out.mkdir()
        apt = PrivateApt(lock["suite"], pathlib.Path(work, "apt"))
        for p in lock["packages"]:
            version = apt.candidate(p["package"])
            done = apt.run("apt-get", "download", f"{p['package']}={version}", cwd=out)
            if done.returncode:
                fail(f"{p['package']}={version}: {done.stderr}")
            p.update(version=version, sha256=sha256(present(out, p["package"], version)))
    path.write_text(json.dumps(lock, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, nargs="?")
    parser.add_argument("--unpack", action="store_true")
    parser.add_argument("--refresh", action="store_true")
    options = parser.parse_args()
    if options.refresh:
        refresh(options.lock)
        return 0
    if options.out is None:
        parser.error("OUT is required")
    lock = json.loads(options.lock.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        Fetcher(lock, options.out, pathlib.Path(work, "apt")).run()
    if options.unpack:
        for p in lock["packages"]:
            deb = options.out / f"{p['package']}.deb"
            subprocess.run(["dpkg-deb", "-x", str(deb), str(options.out)], check=True)
            deb.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
