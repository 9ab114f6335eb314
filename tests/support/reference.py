# SPDX-License-Identifier: MIT
"""`transformers`' Llama over the dequantised weights of a GGUF file: the oracle for tokens and the peer for speed.

The weights are dequantised by the `gguf` package, so nothing of TokenSpeed's own loader or kernels takes part.
GGUF permutes the rows of q and k of llama-architecture files (rotary pairs next to each other); the oracle undoes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _metadata(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields[f"llama.{key}"]
    return field.contents()


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def load_reference(path: str | Path) -> LlamaForCausalLM:
    """The float32 model of a llama-architecture GGUF with tied embeddings, in eval mode."""
    reader = gguf.GGUFReader(str(path))
    heads = int(_metadata(reader, "attention.head_count"))
    kv_heads = int(_metadata(reader, "attention.head_count_kv"))
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = _unpermute(values, heads if ".attn_q." in tensor.name else kv_heads)
        state[_hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=state["lm_head.weight"].shape[0],
        hidden_size=int(_metadata(reader, "embedding_length")),
        intermediate_size=int(_metadata(reader, "feed_forward_length")),
        num_hidden_layers=int(_metadata(reader, "block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(_metadata(reader, "context_length")),
        rope_theta=float(_metadata(reader, "rope.freq_base")),
        rms_norm_eps=float(_metadata(reader, "attention.layer_norm_rms_epsilon")),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


@torch.inference_mode()
def greedy_choices(model: LlamaForCausalLM, prompt_ids: list[int], ids: list[int]) -> tuple[list[int], list[float]]:
    """What the model would pick greedily after the prompt and after each but the last of `ids`, and by which margin.

    One forward instead of a generation: `ids` is the model's greedy continuation exactly when the picks equal it.
    The margin, best minus second logit, tells a real mismatch from a tie that float32 rounding may break either way.
    """
    logits = model(torch.tensor([prompt_ids + ids[:-1]]), use_cache=False, logits_to_keep=len(ids)).logits[0]
    top = logits.topk(2)
    return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()
