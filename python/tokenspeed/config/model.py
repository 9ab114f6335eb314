# SPDX-License-Identifier: MIT
"""What a model is: the numbers of its architecture, from a GGUF file's metadata or a folder's config.json.

Read once at start-up, before any weight; the engine sizes its memory from it and the model is built from it. An
architecture, activation, quantization or rope scaling that we lack is refused here, by name. No torch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenspeed.config.gguf import GGUFFile, read_gguf
from tokenspeed.config.heads import check_split
from tokenspeed.config.json_keys import GGUF_RULES, IDS, TEXTS, check_all, checked, read_json
from tokenspeed.config.latent import LatentConfig, latent_from_gguf, latent_from_json
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_fields import Fields, even_share, ids_of
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.moe import GGUF_SIGMOID, MoEConfig, moe_from_gguf, moe_from_json
from tokenspeed.config.quantization import GGUF_TYPES, QUANTIZATION_BESIDE, Quantization, quantization_from_json
from tokenspeed.config.rope import (
    GEMMA_WINDOWED_THETA,
    RopeScaling,
    extended_context,
    longest_context,
    rope_from_json,
    rope_scaling_from_json,
)

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model; sizes in elements, lengths in tokens.

    architecture: the class name that config.json uses, whatever kind of file the model came from.
    max_position_embeddings: the longest context, rope scaling included.
    dtype: torch's name of the dtype the weights were trained in.
    qkv_bias, output_bias, mlp_bias: which projections add a bias.
    qk_norm: whether queries and keys are normalised per head before rotation.
    windows: attention window of each layer, 0 for full attention.
    attention_softcap, logits_softcap: c, where scores or logits x are c tanh(x / c); 0 for none.
    windowed_rope_theta, windowed_rope_scaling: of layers with a window; theta None: as the others.
    norm_offset: what is added to stored norm weights (1 where a checkpoint stores them around zero).
    attention_sinks: whether each head has a learned logit that takes part in the softmax without a value.
    moe: the experts of a mixture, or None.
    latent: the sizes of multi-head latent attention, or None; `head_dim` is then that of queries.
    num_extra_layers: layers behind the last one in the files that are no part of the model (DeepSeek-V3).
    quantization: how weights are stored; None: dense.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    activation: Activation
    attention_scale: float
    attention_softcap: float
    logits_softcap: float
    windowed_rope_theta: float | None
    windowed_rope_scaling: RopeScaling | None
    norm_offset: float
    attention_sinks: bool
    moe: MoEConfig | None
    latent: LatentConfig | None
    num_extra_layers: int
    quantization: Quantization | None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that stood in for those of config.json (`--hf-overrides`)."""

    @property
    def longest_context(self) -> int:
        """The largest `--max-model-len`; `max_position_embeddings` is what is served by default."""
        return longest_context(self.max_position_embeddings, self.rope_scaling)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ModelError when so many ranks cannot share the model."""
        check_split(self, self.latent is not None, num_ranks)

    def serving(self, context: int) -> ModelConfig:
        """The configuration for an engine that serves up to `context` tokens: rotary tables are made for it."""
        return replace(self, max_position_embeddings=context)


@dataclass(frozen=True)
class _Architecture:
    """What an architecture implies beside its config.json's numbers."""

    name: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    windowed: bool = False
    """Whether a `sliding_window` means anything; some files carry one that their model never had."""
    first_layers_see_all: bool = False
    """With windows: those before `max_window_layers` do."""
    full_every: int = 1
    """With windows: every n-th layer sees everything; 1 where config.json lists the layers that do."""
    own_windowed_rope: bool = False
    """Whether layers with a window rotate with a base of their own."""
    attention_sinks: bool = False
    soft_caps: bool = False
    """Whether scores and logits may have one."""
    latent: bool = False
    yarn_is_truncated: bool = True
    """Whether a GGUF file means yarn's ramp to begin and end at whole pairs."""


_ARCHITECTURES = {
    known.name: known
    for known in (
        _Architecture("LlamaForCausalLM", "llama"),
        _Architecture("MistralForCausalLM", "mistral", windowed=True),
        _Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True, windowed=True, first_layers_see_all=True),
        _Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, windowed=True, first_layers_see_all=True),
        _Architecture(
            "Gemma2ForCausalLM",
            "gemma2",
            activation="gelu_tanh",
            norm_offset=1.0,
            windowed=True,
            full_every=2,
            soft_caps=True,
        ),
        _Architecture(
            "Gemma3ForCausalLM",
            "gemma3_text",
            qk_norm=True,
            activation="gelu_tanh",
            norm_offset=1.0,
            windowed=True,
            full_every=6,
            own_windowed_rope=True,
        ),
        _Architecture("MixtralForCausalLM", "mixtral", windowed=True),
        _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, windowed=True),
        _Architecture("DeepseekV2ForCausalLM", "deepseek_v2", latent=True),
        _Architecture("DeepseekV3ForCausalLM", "deepseek_v3", latent=True),
        _Architecture(
            "GptOssForCausalLM",
            "gpt_oss",
            windowed=True,
            full_every=2,
            attention_sinks=True,
            yarn_is_truncated=False,
        ),
    )
}
# Mistral files call themselves "llama" too.
_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
# ... and Mixtral's. DeepSeek-V3's files call themselves "deepseek2" too.
_GGUF_WITH_EXPERTS = {
    "llama": "MixtralForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
# What the first converters left out.
_GGUF_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
}
# The layers of the one size whose queries are scaled by hidden_size / num_heads: GGUF files do not say it.
_GGUF_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def load_model_config(source: ModelSource, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration of a resolved model. overrides: values in place of config.json's, by their first names.

    Raises ModelError: unsupported, damaged or incomplete.
    """
    if source.kind == "folder":
        return config_from_folder(source.path, overrides or {})
    if overrides:
        raise ModelError(f"{source.path}: --hf-overrides stand in for values of a config.json; this file has none")
    return config_from_gguf(read_gguf(source.path))


# ---------------------------------------------------------------------------------------------- config.json


def config_from_folder(folder: Path, overrides: Mapping[str, Any]) -> ModelConfig:
    """From config.json, with end tokens from generation_config.json where it is there. Raises ModelError."""
    file = folder / "config.json"
    values = {**read_json(file), **overrides}
    architecture = _json_architecture(values, str(file))
    values = checked(values, architecture.name, str(file))
    fields = Fields(values, str(file))
    _refuse_what_is_not_done(fields, architecture)
    declared_context = fields.integer("max_position_embeddings")
    rope, windowed = rope_from_json(values, architecture.own_windowed_rope, str(file))
    scaling = rope_scaling_from_json(rope, declared_context, str(file))
    num_heads, num_layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    latent = latent_from_json(values, str(file)) if architecture.latent else None
    head_dim = latent.query_dim if latent else values.get("head_dim") or even_share(hidden_size, num_heads, str(file))
    scale = float(values.get("query_pre_attn_scalar") or head_dim) ** -0.5
    if latent and scaling:
        scale *= scaling.latent_amplitude
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    generated = _generation_config(folder / "generation_config.json")
    attention_bias = bool(values.get("attention_bias", False))
    return _checked(
        ModelConfig(
            architecture=architecture.name,
            model_type=architecture.model_type,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if latent else values.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or values["rope_theta"]),
            rope_scaling=scaling,
            rotary_dim=latent.rope_dim if latent else int(head_dim * partial),
            max_position_embeddings=_context(architecture, declared_context, scaling),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            bos_token_id=_first_id(values.get("bos_token_id")),
            eos_token_ids=ids_of(values.get("eos_token_id"), generated.get("eos_token_id")),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
            qkv_bias=architecture.qkv_bias or attention_bias,
            output_bias=attention_bias and not architecture.qkv_bias,
            mlp_bias=bool(values.get("mlp_bias", False)),
            qk_norm=architecture.qk_norm,
            windows=_windows(values, num_layers, architecture),
            activation=architecture.activation,
            attention_scale=scale,
            attention_softcap=float(values.get("attn_logit_softcapping") or 0.0),
            logits_softcap=float(values.get("final_logit_softcapping") or 0.0),
            windowed_rope_theta=None if windowed is None else float(windowed["rope_theta"]),
            windowed_rope_scaling=rope_scaling_from_json(windowed or {}, declared_context, str(file)),
            norm_offset=architecture.norm_offset,
            attention_sinks=architecture.attention_sinks,
            moe=moe_from_json(values, architecture.name, num_layers, str(file)),
            latent=latent,
            num_extra_layers=values.get("num_nextn_predict_layers", values.get("num_mtp_layers")) or 0,
            quantization=_json_quantization(values, file),
            overrides=overrides,
        ),
        str(file),
    )


def _refuse_what_is_not_done(fields: Fields, architecture: _Architecture) -> None:
    for name in ("hidden_act", "hidden_activation"):
        fields.refuse_other(name, _ACTIVATIONS[architecture.activation])
    for name in () if architecture.soft_caps else ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.refuse_other(name, None)
    if fields.values.get("use_bidirectional_attention"):
        raise ModelError(f"{fields.where}: 'use_bidirectional_attention' is not supported (only causal attention)")


def _generation_config(file: Path) -> dict[str, Any]:
    """{} without the file. A link to nothing is there too: whoever made it meant a file."""
    values = read_json(file) if os.path.lexists(file) else {}
    check_all(values, {"eos_token_id": IDS}, str(file))
    return values


def _json_quantization(values: Mapping[str, Any], file: Path) -> Quantization | None:
    """From config.json, or where older tools left it."""
    for name, read in QUANTIZATION_BESIDE.items():
        beside = file.parent / name
        if values.get("quantization_config") is None and beside.is_file():
            return quantization_from_json({"quantization_config": read(read_json(beside))}, str(beside))
    return quantization_from_json(values, str(file))


def _json_architecture(values: Mapping[str, Any], where: str) -> _Architecture:
    check_all(values, {"architectures": TEXTS}, where)
    names = values.get("architectures") or []
    if not names:
        raise ModelError(f"{where}: 'architectures' is missing, so the model's architecture is not known")
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise ModelError(f"{where}: architecture {names[0]} is not supported ({', '.join(_ARCHITECTURES)})")


def _context(architecture: _Architecture, declared: int, scaling: RopeScaling | None) -> int:
    # With windows in most layers, the declared context already is the stretched one.
    return declared if architecture.own_windowed_rope else extended_context(declared, scaling)


def _windows(values: Mapping[str, Any], num_layers: int, architecture: _Architecture) -> tuple[int, ...]:
    """A window where the files ask for one: in every layer, from `max_window_layers` on, or by `layer_types`."""
    window = values.get("sliding_window")
    if not architecture.windowed or not window or values.get("use_sliding_window") is False:
        return (0,) * num_layers
    types = values.get("layer_types")
    if types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if architecture.full_every > 1:
        return _interleaved(window, num_layers, values.get("sliding_window_pattern", architecture.full_every))
    first = values.get("max_window_layers", 0) if architecture.first_layers_see_all else 0
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _interleaved(window: int, num_layers: int, full_every: int) -> tuple[int, ...]:
    return tuple(0 if (layer + 1) % full_every == 0 else window for layer in range(num_layers))


# ----------------------------------------------------------------------------------------------------- GGUF


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """From metadata; what metadata leaves out (vocabulary, tied embeddings, biases) from the tensors. ModelError."""
    where, metadata = str(file.path), file.metadata
    check_all(metadata, GGUF_RULES, where)
    prefix = metadata.get("general.architecture")
    if prefix not in _GGUF_ARCHITECTURES:
        known = ", ".join(_GGUF_ARCHITECTURES)
        raise ModelError(f"{where}: architecture {prefix!r} (general.architecture) is not supported ({known})")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{where}: one part of {metadata['split.count']}; merge the parts into one .gguf file first")
    own = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items()}
    fields = Fields(_GGUF_DEFAULTS.get(prefix, {}) | own, where)
    check_all(fields.values, GGUF_RULES, where)
    architecture = _gguf_architecture(prefix, fields)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{where}: tensor 'token_embd.weight' is missing; the file is not a whole model")
    declared_context = fields.integer("context_length")
    scaling = _gguf_rope_scaling(file, fields, declared_context, architecture)
    num_heads, num_layers = fields.integer("attention.head_count"), fields.integer("block_count")
    hidden_size = fields.integer("embedding_length")
    latent = latent_from_gguf(fields.values, where) if architecture.latent else None
    said = latent.query_dim if latent else fields.values.get("attention.key_length")
    head_dim = said or even_share(hidden_size, num_heads, where)
    scaled_by = hidden_size / num_heads if num_layers == _GGUF_SCALED_BY_HIDDEN.get(prefix) else head_dim
    scale = scaled_by**-0.5 * (scaling.latent_amplitude if latent and scaling else 1.0)
    window = fields.values.get("attention.sliding_window", 0)
    interleaves = architecture.full_every > 1
    return _checked(
        ModelConfig(
            architecture=architecture.name,
            model_type=architecture.model_type,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if latent else fields.values.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(fields.values.get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(fields.values.get("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            rotary_dim=latent.rope_dim if latent else fields.values.get("rope.dimension_count", head_dim),
            max_position_embeddings=_context(architecture, declared_context, scaling),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=ids_of(*(metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))),
            dtype="bfloat16",
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            qk_norm=architecture.qk_norm,
            windows=_interleaved(window, num_layers, architecture.full_every)
            if interleaves
            else (window,) * num_layers,
            activation=architecture.activation,
            attention_scale=scale,
            attention_softcap=float(fields.values.get("attn_logit_softcapping", 0.0)),
            logits_softcap=float(fields.values.get("final_logit_softcapping", 0.0)),
            windowed_rope_theta=GEMMA_WINDOWED_THETA if architecture.own_windowed_rope else None,
            windowed_rope_scaling=None,
            # Converters add the offset to the weights themselves.
            norm_offset=0.0,
            attention_sinks=architecture.attention_sinks,
            moe=moe_from_gguf(fields.values, architecture.name, num_layers, where),
            latent=latent,
            num_extra_layers=0,
            quantization=GGUF_TYPES,
        ),
        where,
    )


def _gguf_architecture(prefix: str, fields: Fields) -> _Architecture:
    name = _GGUF_ARCHITECTURES[prefix]
    if fields.values.get("expert_count", 0):
        if prefix not in _GGUF_WITH_EXPERTS:
            raise ModelError(f"{fields.where}: {prefix} with experts (expert_count) is not supported")
        name = _GGUF_WITH_EXPERTS[prefix]
    if prefix == "deepseek2" and fields.values.get("expert_gating_func") == GGUF_SIGMOID:
        name = "DeepseekV3ForCausalLM"
    return _ARCHITECTURES[name]


def _gguf_rope_scaling(
    file: GGUFFile, fields: Fields, declared_context: int, architecture: _Architecture
) -> RopeScaling | None:
    divisors = _read_floats(file, "rope_freqs.weight")
    kind = fields.values.get("rope.scaling.type", "none")
    if kind in ("none", "linear") and fields.values.get("rope.scaling.factor", 1.0) == 1.0:
        return RopeScaling("default", frequency_divisors=divisors) if divisors else None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{fields.where}: rope scaling {kind!r} (rope.scaling.type) is not supported (linear, yarn)")
    # Written as what the logarithm of the factor is multiplied by.
    mscale = float(fields.values.get("rope.scaling.yarn_log_multiplier", 0.0)) * 10 if architecture.latent else 0.0
    return RopeScaling(
        kind=kind,
        mscale=mscale,
        mscale_all_dim=mscale,
        beta_fast=float(fields.values.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(fields.values.get("rope.scaling.yarn_beta_slow", 1.0)),
        truncate=architecture.yarn_is_truncated,
        factor=float(fields.values.get("rope.scaling.factor", 1.0)),
        original_max_position_embeddings=fields.values.get("rope.scaling.original_context_length", declared_context),
        attention_factor=fields.values.get("rope.scaling.attn_factor"),
        frequency_divisors=divisors,
    )


def _read_floats(file: GGUFFile, name: str) -> tuple[float, ...]:
    """The values of a small f32 tensor; () when the file has no such tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.type != "f32":
        raise ModelError(f"{file.path}: tensor {name!r} has type {tensor.type}, expected f32")
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        return struct.unpack(f"<{tensor.nbytes // 4}f", data.read(tensor.nbytes))


# --------------------------------------------------------------------------------------------------- shared


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    """Numbers that disagree with each other are the file's fault; found here, not in a kernel."""
    if not isinstance(config.num_kv_heads, int) or config.num_kv_heads <= 0:
        raise ModelError(f"{where}: the number of KV heads must be one positive number, got {config.num_kv_heads!r}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} heads do not divide among {config.num_kv_heads} KV heads")
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise ModelError(
            f"{where}: rotary size {config.rotary_dim} must be even and at most the head's {config.head_dim}"
        )
    for scaling in (config.rope_scaling, config.windowed_rope_scaling):
        for divisors in (scaling.short_divisors, scaling.long_divisors) if scaling else ():
            if len(divisors) not in (0, config.rotary_dim // 2):
                raise ModelError(
                    f"{where}: longrope has {len(divisors)} factors for {config.rotary_dim // 2} rotary frequencies"
                )
    if len(config.windows) != config.num_layers:
        raise ModelError(f"{where}: layer_types has {len(config.windows)} entries for {config.num_layers} layers")
    return config


def _first_id(value: Any) -> int | None:
    ids = ids_of(value)
    return ids[0] if ids else None
