# SPDX-License-Identifier: MIT
"""Architecture names, as config.json has them, to the pages that implement them."""

from __future__ import annotations

from tokenspeed.config.model_error import ModelError
from tokenspeed.models.deepseek import DeepseekForCausalLM
from tokenspeed.models.gemma3 import Gemma3ForCausalLM
from tokenspeed.models.gpt_oss import GptOssForCausalLM
from tokenspeed.models.llama import LlamaForCausalLM
from tokenspeed.models.mixtral import MixtralForCausalLM
from tokenspeed.models.model import Model
from tokenspeed.models.qwen3_moe import Qwen3MoeForCausalLM

_MODELS: dict[str, type[Model]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Gemma2ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def model_class(architecture: str) -> type[Model]:
    """The page of an architecture. Raises ModelError for one that has none."""
    found = _MODELS.get(architecture)
    if found is None:
        raise ModelError(f"architecture {architecture} is not supported ({', '.join(_MODELS)})")
    return found
