# SPDX-License-Identifier: MIT
"""For tests of models' configurations: a config.json of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenspeed.config.model_source import ModelSource

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": [7, 8],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 7,
    "sliding_window": 32,
    "query_pre_attn_scalar": 64,
    "head_dim": 32,
}
MIXTRAL: dict[str, Any] = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "head_dim": 7,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def folder_with(tmp_path: Path, values: dict[str, Any]) -> ModelSource:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelSource("folder", tmp_path, "test")
