# SPDX-License-Identifier: MIT
"""Who may import whom, as data, and a reader of imports that holds the tree against it.

The table is docs/architecture.md's layers. A module belongs to the longest name in the table that prefixes it; it may
import what its layer lists, its own layer, and anything from outside the project. Tests and the programs that Bazel
starts (python/launch) are free; type-checking imports count as imports.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

# Layer -> layers it may import. "kernels.api" stands for what models and the engine may touch of the kernel library.
PYTHON_LAYERS: dict[str, set[str]] = {
    "tokenspeed_kernel.registry": set(),
    "tokenspeed_kernel._cpu": set(),
    "tokenspeed_kernel.cuda_driver": {"tokenspeed_kernel.registry"},
    "tokenspeed_kernel.api": {"tokenspeed_kernel.registry", "tokenspeed_kernel"},
    "tokenspeed_kernel.numerics": {
        "tokenspeed_kernel.api",
        "tokenspeed_kernel.registry",
        "tokenspeed_kernel._cpu",
        "tokenspeed_kernel",
    },
    "tokenspeed_kernel.bench": {
        "tokenspeed_kernel.api",
        "tokenspeed_kernel.registry",
        "tokenspeed_kernel.numerics",
        "tokenspeed_kernel._cpu",
        "tokenspeed_kernel",
    },
    # The families: attention, gemm, norm and so on.
    "tokenspeed_kernel": {"tokenspeed_kernel.registry", "tokenspeed_kernel._cpu", "tokenspeed_kernel.cuda_driver"},
    "tokenspeed_cc": set(),
    "tokenspeed_protos": set(),
    "tokenspeed": {"tokenspeed.config", "tokenspeed.engine", "tokenspeed.version"},
    "tokenspeed.version": set(),
    "tokenspeed.config": {"tokenspeed.version"},
    "tokenspeed.observability": {"tokenspeed.config", "tokenspeed.version"},
    "tokenspeed.rpc": {"tokenspeed_protos", "tokenspeed.config"},
    # The engine's end of the gRPC lane, with an engine in its process; and the program that starts it.
    "tokenspeed.rpc.grpc.serve": {
        "tokenspeed_cc",
        "tokenspeed_protos",
        "tokenspeed.config",
        "tokenspeed.engine",
        "tokenspeed.gateway.text",
        "tokenspeed.observability",
        "tokenspeed.rpc",
        "tokenspeed.version",
    },
    "tokenspeed.rpc.grpc.__main__": {"tokenspeed.rpc.grpc.serve"},
    "tokenspeed.gateway": {
        "tokenspeed.config",
        "tokenspeed.observability",
        "tokenspeed.rpc",
        "tokenspeed.version",
    },
    "tokenspeed.parallel": {"tokenspeed.config"},
    "tokenspeed.weights": {"tokenspeed_kernel.api", "tokenspeed.config", "tokenspeed.parallel"},
    "tokenspeed.layers": {"tokenspeed_kernel.api", "tokenspeed.config", "tokenspeed.parallel", "tokenspeed.weights"},
    "tokenspeed.models": {"tokenspeed.config", "tokenspeed.layers", "tokenspeed.parallel", "tokenspeed.weights"},
    "tokenspeed.sampling": {"tokenspeed_kernel.api", "tokenspeed.config"},
    "tokenspeed.grammar": {"tokenspeed.config"},
    "tokenspeed.kvstore": {"tokenspeed_kernel.api", "tokenspeed.config"},
    "tokenspeed.engine": {
        "tokenspeed_kernel.api",
        "tokenspeed_kernel._cpu",
        "tokenspeed_kernel.registry",
        "tokenspeed_cc",
        "tokenspeed.config",
        "tokenspeed.grammar",
        "tokenspeed.kvstore",
        "tokenspeed.layers",
        "tokenspeed.models",
        "tokenspeed.observability",
        "tokenspeed.parallel",
        "tokenspeed.rpc",
        "tokenspeed.sampling",
        "tokenspeed.version",
        # Engine and AsyncLLM take and give text without a gateway process: the machines for text, nothing else.
        "tokenspeed.gateway.text",
    },
    # The module paths that released programs import: names only.
    "tokenspeed.runtime": {"tokenspeed.config", "tokenspeed.engine"},
    "tokenspeed.cli": {
        "tokenspeed_kernel",
        "tokenspeed_kernel.bench",
        "tokenspeed.config",
        "tokenspeed.engine",
        "tokenspeed.gateway",
        "tokenspeed.observability",
        "tokenspeed.rpc",
        "tokenspeed.version",
    },
    "tokenspeed.gateway.text": {"tokenspeed.config"},
}

# cc/ folder -> cc/ folders whose headers it may include.
CC_LAYERS: dict[str, set[str]] = {
    "base": set(),
    "cache": {"base"},
    "request": {"base", "cache"},
    "disagg": {"base", "cache", "request"},
    "scheduler": {"base", "cache", "request", "disagg"},
    "bindings": {"base", "cache", "request", "disagg", "scheduler"},
    "testing": {"base", "cache", "request", "disagg", "scheduler"},
    "bench": {"base", "cache", "request", "disagg", "scheduler", "testing"},
}

IMPORT_ROOTS = ("python", "kernels", "cc/bindings")
INCLUDE = re.compile(r'^\s*#include "cc/(\w+)/', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Import:
    """One import of the project's own code: which module writes it, where, and what it names."""

    importer: str
    path: Path
    line: int
    imported: str


def layer_of(module: str) -> str | None:
    """The table's entry for a module; a plain package such as `tokenspeed` holds only modules directly in it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in PYTHON_LAYERS:
            return name
    return None


def imported_names(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, node.module] if node.module else package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imports_in(root: Path) -> Iterator[Import]:
    """Every import of the project's own code in its Python sources, tests left out."""
    for import_root in IMPORT_ROOTS:
        for path in sorted((root / import_root).rglob("*.py")):
            relative = path.relative_to(root / import_root)
            if (
                path.name.endswith("_test.py")
                or path.name == "conftest.py"
                or {"testing", "launch"} & set(relative.parts)
            ):
                continue
            parts = relative.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            # A package's relative imports start at itself, a module's at its package: one name more for a package.
            position = f"{module}.__init__" if parts[-1] == "__init__" else module
            for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), position):
                if name.split(".")[0] in ("tokenspeed", "tokenspeed_kernel", "tokenspeed_cc", "tokenspeed_protos"):
                    yield Import(module, path, line, name)


def forbidden(found: Import) -> bool:
    importer, imported = layer_of(found.importer), layer_of(found.imported)
    if importer is None or imported is None:
        return True
    if imported == importer or imported in PYTHON_LAYERS[importer]:
        return False
    # A layer within an allowed layer (gateway.text within gateway) is allowed too, but not the other way round.
    return not any(
        imported.startswith(f"{allowed}.")
        for allowed in (PYTHON_LAYERS[importer] | {importer})
        - {
            "tokenspeed",
            "tokenspeed_kernel",
        }
    )


def forbidden_includes(root: Path) -> list[str]:
    found = []
    for path in sorted([*(root / "cc").rglob("*.h"), *(root / "cc").rglob("*.cc")]):
        folder = path.relative_to(root / "cc").parts[0]
        allowed = CC_LAYERS[folder] | {folder} | ({"testing"} if path.name.endswith("_test.cc") else set())
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            if name not in allowed:
                found.append(f"{path.relative_to(root)} includes cc/{name}")
    return found
