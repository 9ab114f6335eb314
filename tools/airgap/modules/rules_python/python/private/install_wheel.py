# SPDX-License-Identifier: MIT
"""Installs one locked requirement with pip and writes the BUILD file of its repository.

Called by pip.bzl with one JSON argument, in the repository's folder. Options of the lock (an extra index) are used
only if the machine's own pip configuration does not lead to the file.
"""

import compileall
import importlib.util
import json
import pathlib
import py_compile
import re
import shutil
import subprocess
import sys

BUILD = """load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:py_library.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

filegroup(name = "data", srcs = ["site-packages"])

py_library(
    name = "pkg",
    data = ["site-packages"],
    imports = ["site-packages"],
    deps = {deps},
)

cc_library(
    name = "pybind11_headers",
    hdrs = glob(["site-packages/pybind11/include/**"], allow_empty = True),
    includes = ["site-packages/pybind11/include"],
)
"""

# Not needed to run: C++ headers and tests of torch are half of its files.
PRUNE = ("torch/include", "torch/test", "torch/share/cmake")


def install(spec: dict, site: pathlib.Path) -> None:
    pathlib.Path("requirement.txt").write_text(spec["requirement"] + "\n")
    options = [word for line in spec["options"] for word in line.split()]
    for extra in [[], options] if options else [[]]:
        command = [sys.executable, spec["pip"], "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--only-binary=:all:", "--require-hashes", "--no-warn-script-location", "--disable-pip-version-check"]
        command += ["--root-user-action=ignore", "--target", str(site), "-r", "requirement.txt", *extra]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == 0:
            return
    sys.exit(done.stderr)


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def dependencies(spec: dict, site: pathlib.Path) -> list[str]:
    """What the distribution requires, with the extras that the lock asks of it, as far as the lock has it."""
    if importlib.util.find_spec("pip") is None:
        sys.path.insert(0, str(pathlib.Path(spec["pip"]).parent))
        import run_pip

        sys.path.insert(0, str(run_pip.pip_wheel()))
    from pip._vendor.packaging.requirements import Requirement

    locked = Requirement(spec["requirement"].split("--hash")[0].strip())
    extras = ["", *locked.extras]
    found = set()
    for metadata in site.glob("*.dist-info/METADATA"):
        for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
            if not line:
                break
            if line.startswith("Requires-Dist:"):
                requirement = Requirement(line.split(":", 1)[1].strip())
                marker = requirement.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                    found.add(normalise(requirement.name))
    return sorted(found & set(spec["known"]) - {spec["name"]})


def settle(site: pathlib.Path) -> None:
    """Removes what differs from one installation to the next, and compiles once what every test would compile."""
    for record in site.glob("*.dist-info/RECORD"):
        rows = [r for r in record.read_text().splitlines() if "direct_url.json" not in r and not r.startswith("../")]
        record.write_text("\n".join(rows) + "\n")
    for junk in [*site.glob("*.dist-info/direct_url.json"), *site.glob("*.dist-info/REQUESTED")]:
        junk.unlink()
    for name in PRUNE:
        shutil.rmtree(site / name, ignore_errors=True)
    for script in site.glob("bin/*"):  # they begin with this interpreter's path; programs such as ruff do not
        if script.read_bytes()[:2] == b"#!":
            script.unlink()
    compileall.compile_dir(
        str(site),
        quiet=2,
        stripdir=str(site),
        prependdir="site-packages",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        limit_sl_dest=None,
    )


def main() -> int:
    spec = json.loads(sys.argv[1])
    site = pathlib.Path.cwd() / "site-packages"
    install(spec, site)
    deps = [f"@{spec['hub']}//{name}" for name in dependencies(spec, site)]
    settle(site)
    pathlib.Path("BUILD.bazel").write_text(BUILD.format(deps=json.dumps(deps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
