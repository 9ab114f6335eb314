# SPDX-License-Identifier: MIT
"""Routers choose and weigh as those of `transformers` do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tokenspeed_kernel import api

HIDDEN = 32
SMALL: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 4}
GROUPS: dict[str, Any] = SMALL | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V2 = GROUPS | {"topk_method": "group_limited_greedy"}

CASES: dict[str, tuple[Any, transformers.PreTrainedConfig, api.Routing]] = {
    "mixtral": (MixtralTopKRouter, transformers.MixtralConfig(num_local_experts=8, **SMALL), api.Routing(8, 4)),
    "qwen3": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(num_experts=16, norm_topk_prob=True, **SMALL),
        api.Routing(16, 4),
    ),
    "qwen3 without norm": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(num_experts=16, norm_topk_prob=False, **SMALL),
        api.Routing(16, 4, renormalize=False),
    ),
    "gpt-oss": (GptOssTopKRouter, transformers.GptOssConfig(num_local_experts=8, **SMALL), api.Routing(8, 4)),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(n_routed_experts=16, **V2),
        api.Routing(16, 4, renormalize=False, scale=2.5, num_groups=4, top_groups=2),
    ),
    "deepseek-v2 lite": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(n_routed_experts=16, **(GROUPS | {"topk_method": "greedy"})),
        api.Routing(16, 4, renormalize=False, scale=2.5),
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config(n_routed_experts=16, **GROUPS),
        api.Routing(16, 4, scores="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_score="best_two"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_chosen_experts_and_weights_equal_transformers(case: str) -> None:
    router_class, config, routing = CASES[case]
    torch.manual_seed(5)
    router = router_class(config)
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    x = torch.randn(50, HIDDEN)
    with torch.inference_mode():
        _, weights, experts = router(x)
        logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
    ours, chosen = api.route(logits, routing, getattr(router, "e_score_correction_bias", None))
    order, our_order = experts.argsort(dim=1), chosen.argsort(dim=1)
    assert torch.equal(chosen.gather(1, our_order), experts.gather(1, order).int())
    torch.testing.assert_close(ours.gather(1, our_order), weights.gather(1, order).float(), rtol=1e-5, atol=1e-6)
