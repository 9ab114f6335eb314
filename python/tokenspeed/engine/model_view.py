# SPDX-License-Identifier: MIT
"""A model's shape under the names that servicers of other projects read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tokenspeed.config.model import ModelConfig, load_model_config
from tokenspeed.config.model_source import resolve_model


class ModelView:
    """`ModelView(model)` reads the model's files; `context_length`: what is served, by default all of the model's."""

    is_multimodal = False
    is_multimodal_active = False
    is_audio_model = False

    def __init__(
        self,
        model: str | None,
        *,
        revision: str | None = None,
        context_length: int | None = None,
        shape: ModelConfig | None = None,
        **_others: Any,
    ) -> None:
        found = load_model_config(resolve_model(model, revision=revision)) if shape is None else shape
        self.context_len = found.max_position_embeddings if context_length is None else context_length
        self.vocab_size = found.vocab_size
        self.dtype = getattr(torch, found.dtype)
        self.hf_config = SimpleNamespace(
            model_type=found.model_type,
            architectures=[found.architecture],
            vocab_size=found.vocab_size,
            eos_token_id=list(found.eos_token_ids),
            bos_token_id=found.bos_token_id,
            pad_token_id=None,
            max_position_embeddings=found.max_position_embeddings,
            num_hidden_layers=found.num_layers,
            hidden_size=found.hidden_size,
        )
