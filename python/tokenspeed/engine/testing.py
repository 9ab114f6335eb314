# SPDX-License-Identifier: MIT
"""For tests of a running engine: random checkpoints, requests under way, and calls of its control port."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from tokenspeed.engine.local_frontend import Delta
from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
LATENT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""A DeepSeek: latents for a cache."""

PROMPT = [(7 * step) % 300 + 3 for step in range(40)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
ENDLESS = {"temperature": 0.0, "max_new_tokens": 900, "ignore_eos": True}


def ask(engine: Engine, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> tuple[int, Any]:
    """GET without a body, POST with one."""
    url = f"http://127.0.0.1:{engine.ports.control_port}{path}"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Running:
    """A request under way: its tokens so far and how it ended."""

    def __init__(self, engine: Engine, params: dict[str, Any] = ENDLESS) -> None:
        self.num_tokens = 0
        self.versions: list[str] = []
        self.finish = ""
        self._ended = threading.Event()
        self.rid = (job := engine.job(PROMPT, params)).requests[0].rid
        engine.frontend.submit(job.requests, self._take)

    def _take(self, deltas: object) -> None:
        assert isinstance(deltas, list)
        for delta in deltas:
            assert isinstance(delta, Delta)
            self.num_tokens += len(delta.token_ids)
            if delta.weight_version not in self.versions[-1:]:
                self.versions.append(delta.weight_version)
            self.finish = delta.finish
            if delta.finish:
                self._ended.set()

    def begun(self) -> Running:
        deadline = time.monotonic() + 20
        while not self.num_tokens:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self

    def end(self) -> str:
        assert self._ended.wait(30)
        return self.finish


def start(start_engine: StartEngine, **options: Any) -> Engine:
    return start_engine(rl_control_port=0, **options)


def answer_of(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], GREEDY)[0].token_ids


def checkpoint(folder: Path, seed: int, **changes: Any) -> str:
    """A random Llama of the tests' shape on disk."""
    config: dict[str, Any] = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], 32

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": draw(320, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, shape in {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}.items():
            tensors[f"{name}.self_attn.{part}_proj.weight"] = draw(*shape)
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            tensors[f"{name}.mlp.{part}_proj.weight"] = draw(*shape)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = torch.ones(hidden)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def packed(*parts: dict[str, torch.Tensor]) -> list[str]:
    """As a trainer sends tensors: each part a safetensors file in base64."""
    return [base64.b64encode(save(part)).decode() for part in parts]


def halves(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = load_file(f"{folder}/model.safetensors")
    names = sorted(tensors)
    return ({name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]})
