# SPDX-License-Identifier: MIT
"""Nobody imports upwards: the tree against the table in layers.py, and the gateway's process at run time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layering import layers
from tests.support.processes import python_environment

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "triton",
    "transformers",
    "tokenspeed_kernel",
    "tokenspeed_cc",
    "tokenspeed.engine",
    "tokenspeed.models",
)


def test_the_whole_tree_is_seen() -> None:
    importers = {found.importer.split(".")[1] for found in layers.imports_in(ROOT) if "." in found.importer}
    assert {"config", "rpc", "gateway", "engine", "models", "layers", "api"} <= importers


def test_python_imports_follow_the_layers() -> None:
    wrong = [
        f"{found.path.relative_to(ROOT)}:{found.line}: {found.importer} imports {found.imported}"
        for found in layers.imports_in(ROOT)
        if layers.forbidden(found)
    ]
    assert not wrong, "\n".join(wrong)


def test_includes_follow_the_layers() -> None:
    assert not (wrong := layers.forbidden_includes(ROOT)), "\n".join(wrong)


def test_every_folder_of_the_control_plane_is_in_the_table() -> None:
    folders = {path.name for path in (ROOT / "cc").iterdir() if path.is_dir() and any(path.rglob("*.[ch]*"))}
    assert folders <= set(layers.CC_LAYERS)


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("tokenspeed.gateway.app", "tokenspeed.rpc.lane", False),
        ("tokenspeed.gateway.app", "tokenspeed.engine.loop", True),
        ("tokenspeed.gateway.app", "tokenspeed_kernel.api", True),
        ("tokenspeed.engine.offline", "tokenspeed.gateway.text", False),
        ("tokenspeed.engine.offline", "tokenspeed.gateway.http", True),
        ("tokenspeed.models.llama", "tokenspeed_kernel.gemm.cpu_linear", True),
        ("tokenspeed.models.llama", "tokenspeed.engine.runner", True),
        ("tokenspeed.layers.linear", "tokenspeed_kernel.api", False),
        ("tokenspeed.sampling.sampler", "tokenspeed.engine.pending", True),
        ("tokenspeed.config.flags", "tokenspeed.cli.ts", True),
        ("tokenspeed_kernel.norm.reference", "tokenspeed_kernel.registry.spec", False),
        ("tokenspeed_kernel.norm.reference", "tokenspeed_kernel.api", True),
        ("tokenspeed_kernel.registry.spec", "tokenspeed_kernel.norm", True),
        ("tokenspeed.engine.loop", "tokenspeed.unknown_folder", True),
    ],
)
def test_the_table_says_no_where_it_should(importer: str, imported: str, wrong: bool) -> None:
    assert layers.forbidden(layers.Import(importer, ROOT, 1, imported)) is wrong


def test_the_gateway_process_loads_no_torch_engine_or_kernel() -> None:
    code = "import json, sys\nimport tokenspeed.cli.smg, tokenspeed.gateway.app\nprint(json.dumps(sorted(sys.modules)))"
    env = python_environment()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert not [name for name in loaded if name in HEAVY or name.startswith(tuple(f"{heavy}." for heavy in HEAVY))]
