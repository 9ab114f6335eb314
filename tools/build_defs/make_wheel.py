# SPDX-License-Identifier: MIT
"""Writes a wheel (the binary distribution format of Python packages) from a list of files. Called by wheel.bzl.

Names are sorted, times are the format's first day, and the RECORD is computed: equal files give equal bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import re
import sys
import zipfile

FIRST_DAY = (1980, 1, 1, 0, 0, 0)


def version_in(text: str) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return found.group(1) if found else sys.exit("make_wheel: the version file has no __version__")


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def extras(requires: list[str]) -> list[str]:
    """The names behind `extra == "..."`, of what is not installed unless asked for."""
    return sorted({name for line in requires for name in re.findall(r'extra == "([\w-]+)"', line)})


def metadata(options: argparse.Namespace, version: str) -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {options.distribution}",
        f"Version: {version}",
        f"Summary: {options.summary}",
        "License: MIT",
        "Requires-Python: >=3.11",
        *(f"Provides-Extra: {name}" for name in extras(options.requires)),
        *(f"Requires-Dist: {requirement}" for requirement in options.requires),
    ]
    return "\n".join(lines) + "\n"


def read_files(manifest: pathlib.Path) -> dict[str, bytes]:
    files = {}
    for line in manifest.read_text().splitlines():
        name, source = line.split("\t")
        files[name] = pathlib.Path(source).read_bytes()
    return files


def write(path: pathlib.Path, files: dict[str, bytes], record_name: str) -> None:
    record = "".join(record_line(name, files[name]) for name in sorted(files)) + f"{record_name},,\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*((n, files[n]) for n in sorted(files)), (record_name, record.encode())]:
            info = zipfile.ZipInfo(name, FIRST_DAY)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("manifest", "out", "license"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    for name in ("distribution", "version-file", "tag", "summary"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("requires", "entry-point"):
        parser.add_argument(f"--{name}", action="append", default=[])
    options = parser.parse_args()

    files = read_files(options.manifest)
    if options.version_file not in files:
        sys.exit(f"make_wheel: {options.version_file} is not among the files")
    version = version_in(files[options.version_file].decode())
    info = f"{options.distribution}-{version}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: tokenspeed\nRoot-Is-Purelib: false\nTag: {options.tag}\n"
    scripts = "".join(f"{line}\n" for line in options.entry_point)
    files[f"{info}/METADATA"] = metadata(options, version).encode()
    files[f"{info}/WHEEL"] = wheel.encode()
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    files[f"{info}/LICENSE"] = options.license.read_bytes()
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / f"{options.distribution}-{version}-{options.tag}.whl", files, f"{info}/RECORD")
    return 0


if __name__ == "__main__":
    sys.exit(main())
