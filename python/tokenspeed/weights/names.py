# SPDX-License-Identifier: MIT
"""What GGUF files call the tensors that `transformers` checkpoints name: tables, read both ways."""

from __future__ import annotations

import re
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
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
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
    "deepseek2": {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
    "gpt-oss": {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    },
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}

# Whole names inside a layer that differ in their last part too.
_WHOLE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
}
# Mixtral's older files have a tensor an expert: blk.3.ffn_gate.5.weight.
_EXPERT_PARTS = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_GGUF_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")


class NameTable:
    """Names of one architecture. A name that the table does not know stays itself."""

    def __init__(self, architecture: str) -> None:
        layer = _LAYER | _SPECIAL.get(architecture, {})
        self._to_gguf = _TOP, layer, _WHOLE
        self._to_checkpoint = _inverse(_TOP), _inverse(layer), _inverse(_WHOLE)

    def gguf(self, name: str) -> str:
        """The GGUF name of a checkpoint's."""
        if expert := _EXPERT.fullmatch(name):
            return f"blk.{expert[1]}.{_EXPERT_PARTS[expert[3]]}.{expert[2]}.weight"
        return _translate(name, *self._to_gguf, "model.layers.", "blk.")

    def checkpoint(self, name: str) -> str:
        """The checkpoint's name of a GGUF name."""
        if expert := _GGUF_EXPERT.fullmatch(name):
            part = _inverse(_EXPERT_PARTS)[expert[2]]
            return f"model.layers.{expert[1]}.block_sparse_moe.experts.{expert[3]}.{part}.weight"
        return _translate(name, *self._to_checkpoint, "blk.", "model.layers.")


def _translate(
    name: str,
    top: Mapping[str, str],
    layer: Mapping[str, str],
    whole: Mapping[str, str],
    prefix: str,
    new_prefix: str,
) -> str:
    module, _, kind = name.rpartition(".")
    if module in top:
        return f"{top[module]}.{kind}"
    _, _, rest = name.partition(prefix)
    index, _, part = rest.partition(".")
    if part in whole:
        return f"{new_prefix}{index}.{whole[part]}"
    part = part.rpartition(".")[0]
    return f"{new_prefix}{index}.{layer[part]}.{kind}" if part in layer else name


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in table.items()}
