# SPDX-License-Identifier: MIT
"""What GGUF files call the tensors that `transformers` checkpoints name: one table, read both ways."""

from __future__ import annotations

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

_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}


def gguf_name(name: str) -> str:
    """The GGUF name of a checkpoint name; the name itself when the table does not know it."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, rest = module.partition("model.layers.")
    index, _, part = rest.partition(".")
    return f"blk.{index}.{_LAYER[part]}.{kind}" if part in _LAYER else name


def checkpoint_name(name: str) -> str:
    """The checkpoint name of a GGUF name; the name itself when the table does not know it."""
    module, _, kind = name.rpartition(".")
    if module in _TOP_BACK:
        return f"{_TOP_BACK[module]}.{kind}"
    _, _, rest = module.partition("blk.")
    index, _, part = rest.partition(".")
    return f"model.layers.{index}.{_LAYER_BACK[part]}.{kind}" if part in _LAYER_BACK else name
