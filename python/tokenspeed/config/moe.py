# SPDX-License-Identifier: MIT
"""What a mixture of experts is: numbers of a config.json or of a GGUF file's metadata. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenspeed.config.model_error import ModelError


@dataclass(frozen=True)
class MoEConfig:
    """The routed experts of a model's sparse layers.

    num_experts, top_k: experts of a layer and how many a token is sent to.
    intermediate_size: inner columns of one expert, over all ranks.
    sparse_layers: which layers have experts; the others have one feed-forward network.
    scores, renormalize, scale, num_groups, top_groups, group_score: how experts are chosen and weighed; see
        `tokenspeed_kernel.api.Routing`.
    router_bias: whether the router adds a bias to its logits.
    correction_bias: name, under the router, of the vector that is added to scores for the choice alone; "" for none.
    float32_router: the router's logits are computed in float32 whatever the activations' dtype.
    shared_intermediate_size: inner columns of the network that every token passes beside its experts; 0 for none.
    swiglu_alpha, swiglu_limit: of gpt-oss's clamped activation; a limit of 0 means plain SwiGLU.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    router_bias: bool = False
    correction_bias: str = ""
    float32_router: bool = False
    shared_intermediate_size: int = 0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0


def moe_from_json(values: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> MoEConfig | None:
    """Of a config.json's values; None for an architecture without experts. Raises ModelError."""
    if architecture == "MixtralForCausalLM":
        inner = _positive(values, ("intermediate_size",), where)
        return _checked(_from_names(values, num_layers, inner, where), where)
    if architecture == "Qwen3MoeForCausalLM":
        config = _from_names(values, num_layers, _positive(values, ("moe_intermediate_size",), where), where)
        step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
        sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
        renormalize = bool(values.get("norm_topk_prob", False))
        return _checked(replace(config, sparse_layers=sparse, renormalize=renormalize), where)
    if architecture == "GptOssForCausalLM":
        config = _from_names(values, num_layers, _positive(values, ("intermediate_size",), where), where)
        alpha, limit = (float(values.get(name, default)) for name, default in _CLAMPED_SWIGLU)
        return _checked(replace(config, router_bias=True, swiglu_alpha=alpha, swiglu_limit=limit), where)
    if architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        return _deepseek(values, architecture, num_layers, where)
    return None


def _deepseek(values: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> MoEConfig | None:
    """Experts in groups and shared ones, from the first layer that is not dense on; None where all layers are dense."""
    if not values.get("n_routed_experts"):
        return None
    inner = _positive(values, ("moe_intermediate_size",), where)
    dense, step = values.get("first_k_dense_replace") or 0, values.get("moe_layer_freq") or 1
    config = MoEConfig(
        num_experts=_positive(values, ("n_routed_experts",), where),
        top_k=_positive(values, ("num_experts_per_tok",), where),
        intermediate_size=inner,
        sparse_layers=tuple(layer >= dense and layer % step == 0 for layer in range(num_layers)),
        scale=float(values.get("routed_scaling_factor") or 1.0),
        float32_router=True,
        shared_intermediate_size=inner * (values.get("n_shared_experts") or 0),
    )
    if architecture == "DeepseekV3ForCausalLM":
        _refuse_other(values, "scoring_func", "sigmoid", where)
        _refuse_other(values, "topk_method", "noaux_tc", where)
        v3 = replace(
            config,
            scores="sigmoid",
            renormalize=bool(values.get("norm_topk_prob", True)),
            correction_bias="e_score_correction_bias",
            group_score="best_two",
        )
        return _checked(_in_groups(v3, values), where)
    _refuse_other(values, "scoring_func", "softmax", where)
    # Never published; the model's own code and transformers would scale such weights differently.
    _refuse_other(values, "norm_topk_prob", False, where)
    method = values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{where}: topk_method {method!r} is not supported (greedy, group_limited_greedy)")
    v2 = replace(config, renormalize=False)
    return _checked(v2 if method == "greedy" else _in_groups(v2, values), where)


def _in_groups(config: MoEConfig, values: Mapping[str, Any]) -> MoEConfig:
    return replace(config, num_groups=values.get("n_group") or 1, top_groups=values.get("topk_group") or 1)


def _refuse_other(values: Mapping[str, Any], name: str, supported: Any, where: str) -> None:
    value = values.get(name)
    if value is not None and value != supported:
        raise ModelError(f"{where}: {name} {value!r} is not supported (only {supported!r})")


def moe_from_gguf(values: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> MoEConfig | None:
    """Of a GGUF file's metadata without the architecture's prefix; None without experts. Raises ModelError."""
    if not values.get("expert_count"):
        return None
    inner = "feed_forward_length" if architecture == "MixtralForCausalLM" else "expert_feed_forward_length"
    if architecture == "GptOssForCausalLM" and inner not in values:
        inner = "feed_forward_length"
    config = MoEConfig(
        num_experts=_positive(values, ("expert_count",), where),
        top_k=_positive(values, ("expert_used_count",), where),
        intermediate_size=_positive(values, (inner,), where),
        sparse_layers=(True,) * num_layers,
    )
    if architecture == "GptOssForCausalLM":
        (_, alpha), (_, limit) = _CLAMPED_SWIGLU
        config = replace(config, router_bias=True, swiglu_alpha=alpha, swiglu_limit=limit)
    if architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        config = _deepseek_gguf(config, values, architecture == "DeepseekV3ForCausalLM")
    return _checked(config, where)


def _deepseek_gguf(config: MoEConfig, values: Mapping[str, Any], sigmoid: bool) -> MoEConfig:
    num_groups, top_groups = _GROUPS_OF.get(config.num_experts, (1, 1))
    dense = values.get("leading_dense_block_count", 0)
    common = replace(
        config,
        sparse_layers=tuple(layer >= dense for layer in range(len(config.sparse_layers))),
        renormalize=bool(values.get("expert_weights_norm", sigmoid)),
        scale=float(values.get("expert_weights_scale") or 1.0),
        num_groups=values.get("expert_group_count", num_groups),
        top_groups=values.get("expert_group_used_count", top_groups),
        float32_router=True,
        shared_intermediate_size=config.intermediate_size * values.get("expert_shared_count", 0),
    )
    if not sigmoid:
        return common
    return replace(common, scores="sigmoid", correction_bias="e_score_correction_bias", group_score="best_two")


GGUF_SIGMOID = 2
"""`expert_gating_func` of files whose routers score by sigmoids."""
# Groups, and how many are chosen, of the models that were published, which older files leave out: V2 and V3.
_GROUPS_OF = {160: (8, 3), 256: (8, 4)}
_CLAMPED_SWIGLU = (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))


def _from_names(values: Mapping[str, Any], num_layers: int, intermediate_size: int, where: str) -> MoEConfig:
    """Experts in every layer, chosen by a softmax over the best."""
    return MoEConfig(
        num_experts=_positive(values, ("num_local_experts", "num_experts"), where),
        top_k=_positive(values, ("num_experts_per_tok",), where),
        intermediate_size=intermediate_size,
        sparse_layers=(True,) * num_layers,
    )


def _positive(values: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    """The first of these names that is there."""
    for name in names:
        value = values.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ModelError(f"{where}: {name!r} must be a positive whole number, got {value!r}")
            return value
    raise ModelError(f"{where}: {names[0]!r} is missing")


def _checked(config: MoEConfig, where: str) -> MoEConfig:
    if config.top_k > config.num_experts:
        raise ModelError(f"{where}: {config.top_k} experts a token cannot be chosen from {config.num_experts}")
    size = config.num_experts // config.num_groups
    if config.num_experts % config.num_groups or not 1 <= config.top_groups <= config.num_groups:
        raise ModelError(
            f"{where}: {config.num_experts} experts in {config.num_groups} groups (n_group), of which "
            f"{config.top_groups} are chosen (topk_group), do not go together"
        )
    if config.top_k > size * config.top_groups or (config.group_score == "best_two" and size < 2):
        raise ModelError(
            f"{where}: {config.top_groups} groups of {size} experts are too few for {config.top_k} a token"
        )
    return config
