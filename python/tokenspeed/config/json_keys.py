# SPDX-License-Identifier: MIT
"""The keys of a config.json that we read: what each may hold, and what it means when it is left out; GGUF's beside.

`checked` is called before anything is computed from the values, so that whatever reads them after it may trust their
types. What is left out means what `transformers` takes it for, but for sizes that every model states. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenspeed.config.model_error import ModelError

_LARGEST = 2**48


class Rule(NamedTuple):
    """what: in words, for messages. holds: of a value that is not null."""

    what: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


SIZE = Rule("a positive whole number", lambda value: _is_int(value) and 0 < value <= _LARGEST)
COUNT = Rule("a whole number that is not negative", lambda value: _is_int(value) and 0 <= value <= _LARGEST)
LAYERS = Rule("a positive whole number up to 10000", lambda value: _is_int(value) and 0 < value <= 10_000)
POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and value > 0)
NUMBER = Rule("a number", _is_number)
SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
OBJECTS = Rule("an object of objects", lambda value: isinstance(value, dict) and all(map(OBJECT.holds, value.values())))
DIVISORS = Rule("a list of numbers above 0", lambda value: _is_list_of(value, POSITIVE.holds))
TILE = Rule("a list of two sizes", lambda value: _is_list_of(value, SIZE.holds) and len(value) == 2)
TEXTS = Rule("a list of strings", lambda value: _is_list_of(value, TEXT.holds))
NUMBERS_OF_LAYERS = Rule("a list of whole numbers", lambda value: _is_list_of(value, _is_int))
IDS = Rule("a token id or a list of them", lambda value: _is_int(value) or _is_list_of(value, _is_int))
LAYER_TYPES = Rule(
    "a list of 'full_attention' and 'sliding_attention'",
    lambda value: _is_list_of(value, lambda kind: kind in ("full_attention", "sliding_attention")),
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "decoder_sparse_step",
            "moe_layer_freq",
            "n_group",
            "topk_group",
        ),
        SIZE,
    ),
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(
        (
            "sliding_window",
            "max_window_layers",
            "sliding_window_pattern",
            "first_k_dense_replace",
            "n_routed_experts",
            "n_shared_experts",
            "num_nextn_predict_layers",
            "num_mtp_layers",
        ),
        COUNT,
    ),
    **dict.fromkeys(("rms_norm_eps", "swiglu_limit"), NUMBER),
    **dict.fromkeys(
        (
            "rope_theta",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "partial_rotary_factor",
            "routed_scaling_factor",
            "swiglu_alpha",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
            "norm_topk_prob",
            "rope_interleave",
            "use_bidirectional_attention",
        ),
        SWITCH,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "dtype", "torch_dtype", "topk_method", "scoring_func"), TEXT),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config", "compression_config"), OBJECT),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), IDS),
    "mlp_only_layers": NUMBERS_OF_LAYERS,
    "layer_types": LAYER_TYPES,
}

GGUF_RULES: dict[str, Rule] = {
    "general.architecture": TEXT,
    "block_count": LAYERS,
    **dict.fromkeys(
        (
            "context_length",
            "embedding_length",
            "attention.head_count",
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
            "rope.scaling.original_context_length",
            "expert_group_count",
            "expert_group_used_count",
        ),
        SIZE,
    ),
    **dict.fromkeys(
        ("attention.sliding_window", "leading_dense_block_count", "expert_count", "expert_shared_count"), COUNT
    ),
    **dict.fromkeys(("rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor"), POSITIVE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), POSITIVE),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), POSITIVE),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.scaling.yarn_log_multiplier"), NUMBER),
    "expert_weights_scale": NUMBER,
    "rope.scaling.type": TEXT,
}
"""Of a GGUF file's metadata without the architecture's prefix."""

_NO_SCALING: dict[str, Any] = {"rope_theta": 10000.0}
_QWEN = {**_NO_SCALING, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _NO_SCALING,
    "MistralForCausalLM": {**_NO_SCALING, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {**_QWEN, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "MixtralForCausalLM": {
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
    },
    "Gemma2ForCausalLM": {
        **_NO_SCALING,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "GptOssForCausalLM": {
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "DeepseekV2ForCausalLM": {**_NO_SCALING, "n_shared_experts": 2},
    "DeepseekV3ForCausalLM": {
        **_NO_SCALING,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
    },
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
# Keys by which null says something that leaving them out does not.
_NULL_SAYS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "num_key_value_heads",
    "head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
)


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds. Raises ModelError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return values


def checked(raw: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """`raw` without nulls that say nothing, and with what it leaves out. Raises ModelError naming key and file."""
    check_all(raw, _RULES, where)
    values = {key: value for key, value in raw.items() if value is not None or key in _NULL_SAYS}
    values = {**_DEFAULTS[architecture], **values}
    if architecture == "GptOssForCausalLM" and not (values.get("rope_parameters") or values.get("rope_scaling")):
        values["rope_parameters"] = _GPT_OSS_ROPE
    return values


def check_all(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    """Raise ModelError for the first value that is neither null nor what its rule says."""
    for key, rule in rules.items():
        value = values.get(key)
        if value is not None and not rule.holds(value):
            raise ModelError(f"{where}: {key!r} must be {rule.what}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
