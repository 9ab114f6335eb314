# SPDX-License-Identifier: MIT
"""`transformers` over the dequantised weights of a GGUF file: the oracle for tokens and the peer for speed.

The weights are dequantised by the `gguf` package, so nothing of TokenSpeed's own loader or kernels takes part.
GGUF permutes the rows of q and k of llama-architecture files (rotary pairs next to each other) and adds one to Gemma's
norms; the oracle undoes both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str, architecture: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP_NAMES:
        return f"{_TOP_NAMES[module]}.{kind}"
    _, layer, part = module.split(".")
    names = _GEMMA_NAMES if architecture == "gemma3" else _LAYER_NAMES
    return f"model.layers.{layer}.{names[part]}.{kind}"


class _File:
    """A file's metadata and its tensors as `transformers` has them."""

    def __init__(self, path: str | Path) -> None:
        self._reader = gguf.GGUFReader(str(path))
        self.architecture: str = self._reader.fields["general.architecture"].contents()

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def state(self) -> dict[str, torch.Tensor]:
        heads = {".attn_q.": self.get("attention.head_count"), ".attn_k.": self.get("attention.head_count_kv")}
        state = {}
        for tensor in self._reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            for part, count in heads.items():
                if self.architecture == "llama" and part in tensor.name:
                    values = _unpermute(values, int(count))
            name = _hf_name(tensor.name, self.architecture)
            if self.architecture == "gemma3" and "norm" in name:
                values = values - 1.0
            state[name] = torch.from_numpy(np.ascontiguousarray(values))
        return state


def load_reference(path: str | Path) -> PreTrainedModel:
    """The float32 model of a llama-, qwen2- or gemma3-architecture GGUF file, in eval mode."""
    file = _File(path)
    state = file.state()
    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    heads = int(file.get("attention.head_count"))
    hidden_size = int(file.get("embedding_length"))
    values: dict[str, Any] = {
        "vocab_size": state["lm_head.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": int(file.get("feed_forward_length")),
        "num_hidden_layers": int(file.get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("attention.head_count_kv")),
        "max_position_embeddings": int(file.get("context_length")),
        "rms_norm_eps": float(file.get("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
    }
    if file.architecture == "gemma3":
        head_dim = int(file.get("attention.key_length"))
        values |= {"head_dim": head_dim, "query_pre_attn_scalar": head_dim, "pad_token_id": 0}
        values["sliding_window"] = int(file.get("attention.sliding_window"))
    else:
        values["rope_theta"] = float(file.get("rope.freq_base"))
    config_class, model_class = _CLASSES[file.architecture]
    model: PreTrainedModel = model_class(config_class(**values))
    model.load_state_dict(state)
    return model.eval()


@torch.inference_mode()
def token_losses(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Minus the log-probability of each token after the first, float32 [T - 1]."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="none")


@torch.inference_mode()
def greedy_choices(model: PreTrainedModel, prompt_ids: list[int], ids: list[int]) -> tuple[list[int], list[float]]:
    """What the model would pick greedily after the prompt and after each but the last of `ids`, and by which margin.

    One forward instead of a generation: `ids` is the model's greedy continuation exactly when the picks equal it.
    The margin, best minus second logit, tells a real mismatch from a tie that float32 rounding may break either way.
    """
    logits = model(torch.tensor([prompt_ids + ids[:-1]]), use_cache=False, logits_to_keep=len(ids)).logits[0]
    top = logits.topk(2)
    return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()
