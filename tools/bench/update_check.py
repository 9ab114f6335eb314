# SPDX-License-Identifier: MIT
"""On a GPU: after `update_weights_from_disk` an engine answers as one that started with the new weights, dense and fp8,
and a checkpoint that does not fit changes nothing. Exit status 1 when it does not hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, dict[str, Any]] = {"dense": {}, "fp8 weights": {"quantization": "fp8"}}
PARAMS = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def checkpoint(folder: Path, seed: int, num_layers: int) -> str:
    """Random weights of CONFIG, in `folder`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    sizes = {"self_attn.q_proj": (1024, hidden), "self_attn.k_proj": (256, hidden), "self_attn.v_proj": (256, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, 1024), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    sizes |= {"mlp.down_proj": (hidden, inner)}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": 128}
    norms |= {"self_attn.k_norm": 128}

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    tensors = {"model.embed_tokens.weight": draw(vocab, hidden), "lm_head.weight": draw(vocab, hidden)}
    tensors["model.norm.weight"] = 1 + draw(hidden)
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.{part}.weight": draw(*shape) for part, shape in sizes.items()}
        tensors |= {f"{name}.{part}.weight": 1 + draw(size) for part, size in norms.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def update(engine: Any, path: str) -> int:
    """The HTTP status of the call; what a refusal says is printed, so that a wrong one explains itself."""
    url = f"http://127.0.0.1:{engine.ports.control_port}/update_weights_from_disk"
    request = urllib.request.Request(url, json.dumps({"model_path": path}).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        print(f"{error.code} for {Path(path).name}: {error.read().decode()}", flush=True)
        return error.code


def differences(name: str, folder: Path) -> int:
    from tokenspeed import Engine

    old, new = checkpoint(folder / "old", 1, 3), checkpoint(folder / "new", 2, 3)
    deeper = checkpoint(folder / "deeper", 3, 4)
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 4000, length).tolist() for length in (5, 100, 700)]

    def answers(engine: Any) -> list[list[int]]:
        return [engine.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]

    def start(path: str) -> Any:
        # A port that is free; no cache, since what is computed from one differs in its last bits.
        return Engine(
            path,
            skip_tokenizer_init=True,
            max_num_seqs=8,
            rl_control_port=0,
            enable_prefix_caching=False,
            **OPTIONS[name],
        )

    fresh = start(new)
    expected = answers(fresh)
    fresh.shutdown()
    engine = start(old)
    before = answers(engine)
    checks = {
        "the weights differ": before != expected,
        "a deeper model is refused": update(engine, deeper) == 400,
        "which changes nothing": answers(engine) == before,
        "new weights are taken": update(engine, new) == 200 and answers(engine) == expected,
        "and the old ones again": update(engine, old) == 200 and answers(engine) == before,
        "nothing compiles late": engine.late_compiles == 0,
    }
    engine.shutdown()
    for text, holds in checks.items():
        print(f"{'ok' if holds else 'WRONG':6}{name}: {text}", flush=True)
    return sum(not holds for holds in checks.values())


def main() -> int:
    wrong = 0
    for name in OPTIONS:
        with tempfile.TemporaryDirectory() as folder:
            wrong += differences(name, Path(folder))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
