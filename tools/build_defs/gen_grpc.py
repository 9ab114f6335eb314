# SPDX-License-Identifier: MIT
"""Python stubs of .proto files as one package, by the protoc in the locked grpcio-tools wheel. Called by proto.bzl only.

protoc writes absolute imports by file name (`import common_pb2`); inside a package they must name it, so those lines,
and no others, are rewritten.
"""

import argparse
import pathlib
import re
import sys

import grpc_tools
from grpc_tools import protoc

_IMPORT = re.compile(r"^import (\w+_pb2) as (\w+)$", re.MULTILINE)
_PLAIN_IMPORT = re.compile(r"^import (\w+_pb2)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the package's folder")
    parser.add_argument("protos", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    includes = [f"-I{path}" for path in [*sorted({p.parent for p in options.protos}), well_known]]
    outputs = [f"--{kind}_out={options.out}" for kind in ("python", "pyi", "grpc_python")]
    status = int(protoc.main(["protoc", *includes, *outputs, *(p.name for p in options.protos)]))
    if status:
        return status
    package = options.out.name
    for path in sorted(options.out.iterdir()):
        text = path.read_text(encoding="utf-8")
        text = _IMPORT.sub(rf"from {package} import \1 as \2", text)
        path.write_text(_PLAIN_IMPORT.sub(rf"from {package} import \1", text), encoding="utf-8")
    titles = ", ".join(p.name for p in options.protos)
    (options.out / "__init__.py").write_text(f'"""Generated from {titles}."""\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
