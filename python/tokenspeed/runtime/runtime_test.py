# SPDX-License-Identifier: MIT
"""Every path that released programs import is there, and holds nothing but names."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest

from tokenspeed.runtime.grammar.reasoning_structural_tag import structural_tag_for_reasoning_json_schema
from tokenspeed.runtime.pd.utils import KVClassType, TransferBackend, get_kv_class
from tokenspeed.runtime.utils.network import get_local_ip_by_remote

PATHS = [
    "utils.server_args.ServerArgs",
    "utils.server_args.PortArgs",
    "utils.server_args.prepare_server_args",
    "utils.network.get_local_ip_by_remote",
    "utils.process.kill_process_tree",
    "entrypoints.engine.Engine",
    "entrypoints.engine._launch_subprocesses",
    "entrypoints.engine.launch_scheduler_headless",
    "engine.async_llm.AsyncLLM",
    "engine.io_struct.GenerateReqInput",
    "multimodal.inputs.Modality",
    "multimodal.inputs.MultimodalDataItem",
    "multimodal.inputs.MultimodalInputs",
    "multimodal.shm_transport.ShmTensorHandle",
    "multimodal.hash.hash_feature",
    "epd.encode_worker.EncodeRequest",
    "configs.model_config.ModelConfig",
    "grammar.reasoning_structural_tag.structural_tag_for_reasoning_json_schema",
    "pd.utils.KVClassType",
    "pd.utils.TransferBackend",
    "pd.utils.get_kv_class",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_released_program_finds_what_it_imports(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(f"tokenspeed.runtime.{module}"), name)


def test_the_facade_has_no_logic() -> None:
    files = [path for path in Path(__file__).parent.rglob("*.py") if not path.name.endswith("_test.py")]
    assert len(files) > 10
    for path in files:
        kinds = {type(node) for node in ast.parse(path.read_text()).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, path


def test_a_schema_waits_for_the_end_of_reasoning() -> None:
    tag = structural_tag_for_reasoning_json_schema("qwen3", {"type": "object"})
    assert tag is not None and json.loads(tag)["format"]["elements"][0]["end"] == "</think>"
    assert structural_tag_for_reasoning_json_schema("passthrough", {"type": "object"}) is None


def test_transfers_between_engines_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="mooncake"):
        get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER)


def test_this_host_has_an_address() -> None:
    assert get_local_ip_by_remote().count(".") == 3 or ":" in get_local_ip_by_remote()
