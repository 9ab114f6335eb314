# SPDX-License-Identifier: MIT
"""What GGUF files call the tensors that `transformers` checkpoints name: tables, read both ways."""

from __future__ import annotations

from collections.abc import Mapping

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}

# Inside "model.layers.N" and "blk.N".
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Where an architecture means something else by a name, or has more of them; by GGUF's name of the architecture.
_SPECIAL: dict[str, dict[str, str]] = {
    # Mixtral's files call themselves "llama".
    "llama": {
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.experts.w1": "ffn_gate_exps",
        "block_sparse_moe.experts.w3": "ffn_up_exps",
        "block_sparse_moe.experts.w2": "ffn_down_exps",
    },
    "qwen3moe": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    },
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


class NameTable:
    """Names of one architecture. A name that the table does not know stays itself."""

    def __init__(self, architecture: str) -> None:
        layer = _LAYER | _SPECIAL.get(architecture, {})
        self._to_gguf = _TOP, layer
        self._to_checkpoint = _inverse(_TOP), _inverse(layer)

    def gguf(self, name: str) -> str:
        """The GGUF name of a checkpoint's."""
        return _translate(name, *self._to_gguf, "model.layers.", "blk.")

    def checkpoint(self, name: str) -> str:
        """The checkpoint's name of a GGUF name."""
        return _translate(name, *self._to_checkpoint, "blk.", "model.layers.")


def _translate(name: str, top: Mapping[str, str], layer: Mapping[str, str], prefix: str, new_prefix: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in top:
        return f"{top[module]}.{kind}"
    _, _, rest = module.partition(prefix)
    index, _, part = rest.partition(".")
    return f"{new_prefix}{index}.{layer[part]}.{kind}" if part in layer else name


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
