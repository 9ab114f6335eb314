# SPDX-License-Identifier: MIT
"""Writes one importable Python package of gRPC stubs from a folder of .proto files.

Called by the rule in proto.bzl, and by hand for development without Bazel:
  python tools/build_defs/gen_grpc.py --proto-root protos/tokenspeed/grpc --package tokenspeed_protos --out protos

The .proto files are compiled under their names relative to --proto-root, because that name is part of a file's
descriptor, which reflection tells. A process that has loaded other descriptors under these names (the released stubs)
cannot load these too. protoc writes imports between siblings as if they stood at the top level; they are turned into
imports from the package.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

INIT = '# SPDX-License-Identifier: MIT\n"""Generated gRPC stubs; the sources are the .proto files."""\n'


def compile_protos(proto_root: Path, out: Path, names: list[str]) -> None:
    """Runs protoc; its messages go to stderr. Raises SystemExit when it fails."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{proto_root}", f"-I{well_known}", *outputs, *names])
    if status != 0:
        sys.exit(f"protoc failed with {status} on {', '.join(names)}")


def import_from_package(text: str, package: str, stems: list[str]) -> str:
    """`import x_pb2 as y` becomes `from package import x_pb2 as y` for the siblings in `stems`."""
    for stem in stems:
        text = re.sub(rf"^import {stem}_pb2\b", f"from {package} import {stem}_pb2", text, flags=re.MULTILINE)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proto-root", type=Path, required=True, help="folder that imports are relative to")
    parser.add_argument("--package", required=True, help="name of the Python package to write")
    parser.add_argument("--out", type=Path, required=True, help="folder that the package is written into")
    args = parser.parse_args()
    names = sorted(path.name for path in args.proto_root.glob("*.proto"))
    if not names:
        sys.exit(f"no .proto file in {args.proto_root}")
    folder = args.out / args.package
    folder.mkdir(parents=True, exist_ok=True)
    compile_protos(args.proto_root, folder, names)
    stems = [name.removesuffix(".proto") for name in names]
    for path in sorted(folder.glob("*_pb2*.py*")):
        path.write_text(import_from_package(path.read_text(), args.package, stems))
    (folder / "__init__.py").write_text(INIT)


if __name__ == "__main__":
    main()
