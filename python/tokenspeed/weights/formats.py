# SPDX-License-Identifier: MIT
"""`--load-format`: which reader opens a model. A new format is one entry here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.weights.dummy_reader import DummyReader
from tokenspeed.weights.gguf_reader import GGUFReader, HeadCounts
from tokenspeed.weights.reader import WeightReader
from tokenspeed.weights.safetensors_reader import SafetensorsReader

Opener = Callable[[ModelSource, ModelConfig, torch.device], WeightReader]


def open_weights(source: ModelSource, config: ModelConfig, load_format: str, device: torch.device) -> WeightReader:
    """The reader of a model's weights, which files give on the CPU and invented ones on `device`.

    Raises ModelError: unknown format, or one that does not fit the source.
    """
    name = load_format if load_format != "auto" else _AUTO[source.kind]
    opener = LOAD_FORMATS.get(name)
    if opener is None:
        raise ModelError(f"--load-format {load_format} is not supported (auto, {', '.join(LOAD_FORMATS)})")
    return opener(source, config, device)


def _open_gguf(source: ModelSource, config: ModelConfig, _device: torch.device) -> WeightReader:
    if source.kind != "gguf":
        raise ModelError(f"{source.path}: not a .gguf file, as --load-format gguf needs")
    return GGUFReader(source.path, HeadCounts(config.num_heads, config.num_kv_heads))


def _open_safetensors(source: ModelSource, config: ModelConfig, _device: torch.device) -> WeightReader:
    if source.kind != "folder":
        raise ModelError(f"{source.path}: not a folder of weights, as --load-format safetensors needs")
    return SafetensorsReader(source.path)


def _open_dummy(source: ModelSource, config: ModelConfig, device: torch.device) -> WeightReader:
    dtype = getattr(torch, config.dtype, None)
    return DummyReader(dtype if isinstance(dtype, torch.dtype) else torch.float32, device)


_AUTO = {"gguf": "gguf", "folder": "safetensors"}
LOAD_FORMATS: dict[str, Opener] = {
    "gguf": _open_gguf,
    "safetensors": _open_safetensors,
    "dummy": _open_dummy,
}
