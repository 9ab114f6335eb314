# SPDX-License-Identifier: MIT
"""`--load-format`: which reader opens a model. A new format is one entry here, or a class that the user names."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.quantization import Quantization
from tokenspeed.weights import pt_reader, safetensors_reader
from tokenspeed.weights.dummy_reader import DummyReader
from tokenspeed.weights.folder_reader import FolderReader, has_shards
from tokenspeed.weights.gguf_reader import GGUFReader, HeadCounts
from tokenspeed.weights.npcache_reader import NpcacheReader
from tokenspeed.weights.overlay import NamedTensors, overlay
from tokenspeed.weights.pt_reader import PtReader
from tokenspeed.weights.quantized_reader import QuantizedReader
from tokenspeed.weights.reader import WeightReader
from tokenspeed.weights.safetensors_reader import SafetensorsReader
from tokenspeed_kernel import api

logger = logging.getLogger("tokenspeed.weights")


@dataclass(frozen=True)
class LoadPlan:
    """load_format: "auto", or a key of LOAD_FORMATS. quantization: of folders; None for dense weights.
    extra: what `--model-loader-extra-config` says, for "extensible": "loader" names "module:Class".
    device: where the weights will be; files give them on the CPU, invented ones are made there.
    named_tensors: in place of the source's of these names."""

    load_format: str
    quantization: Quantization | None
    extra: Mapping[str, Any]
    device: torch.device
    named_tensors: NamedTensors = field(default_factory=dict)


Opener = Callable[[ModelSource, ModelConfig, LoadPlan], WeightReader]


def open_weights(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    """The reader of a model's weights. Raises ModelError: unknown format, or one that does not fit the source."""
    opener = _AUTO[source.kind] if plan.load_format == "auto" else LOAD_FORMATS.get(plan.load_format)
    if opener is None:
        raise ModelError(f"--load-format {plan.load_format} is not supported (auto, {', '.join(LOAD_FORMATS)})")
    reader = overlay(opener(source, config, plan), plan.named_tensors)
    if plan.quantization is not None and isinstance(reader, FolderReader):
        return QuantizedReader(reader, plan.quantization, _dtype(config))
    return reader


def tell_inputs(quantization: Quantization | None, device: torch.device, dtype: torch.dtype) -> None:
    """Say where a checkpoint that was made for products of fp8 with fp8 gets more exact ones."""
    rounds = quantization is not None and any(group.rounds_inputs for group in quantization.groups)
    if rounds and not api.rounds_inputs(device.type):
        name = str(dtype).removeprefix("torch.")
        logger.info("fp8 weights stay in fp8, inputs in %s: %s has no products of fp8 with fp8", name, device.type)


def _open_gguf(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    if source.kind != "gguf":
        raise ModelError(f"{source.path}: not a .gguf file, as --load-format gguf needs")
    return GGUFReader(source.path, HeadCounts(config.num_heads, config.num_kv_heads))


def _open_folder(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    return _checkpoint(source, "auto")


def _open_safetensors(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    return SafetensorsReader(_folder(source, plan.load_format))


def _open_pt(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    return PtReader(_folder(source, "pt"))


def _open_npcache(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    return NpcacheReader(_folder(source, "npcache"), _checkpoint(source, "npcache"))


def _open_dummy(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    return DummyReader(_dtype(config), plan.device, plan.quantization)


def _open_extensible(source: ModelSource, config: ModelConfig, plan: LoadPlan) -> WeightReader:
    """A class of the user's: `Class(source, config, **rest of the extra config)` must be a WeightReader."""
    extra = dict(plan.extra)
    name = extra.pop("loader", None)
    flag = "--model-loader-extra-config"
    if not isinstance(name, str) or name.count(":") != 1:
        raise ModelError(f'{flag}: --load-format extensible needs {{"loader": "module:Class"}}, got {name!r}')
    module, _, attribute = name.partition(":")
    try:
        loader = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{flag}: loader {name!r} cannot be imported: {error}") from None
    try:
        reader = loader(source, config, **extra)
    except TypeError as error:
        raise ModelError(f"{flag}: loader {name!r} does not take these arguments: {error}") from None
    if not isinstance(reader, WeightReader):
        raise ModelError(
            f"{flag}: loader {name!r} made a {type(reader).__name__}, not a tokenspeed.weights.WeightReader"
        )
    return reader


def _checkpoint(source: ModelSource, load_format: str) -> FolderReader:
    """Safetensors where there are any, else files of torch.save."""
    folder = _folder(source, load_format)
    has_safetensors = has_shards(folder, safetensors_reader.WHOLE_NAME, safetensors_reader.PATTERNS)
    has_pt = has_shards(folder, pt_reader.WHOLE_NAME, pt_reader.PATTERNS)
    return PtReader(folder) if has_pt and not has_safetensors else SafetensorsReader(folder)


def _folder(source: ModelSource, load_format: str) -> Any:
    if source.kind != "folder":
        raise ModelError(f"{source.path}: not a folder of weights, as --load-format {load_format} needs")
    return source.path


def _dtype(config: ModelConfig) -> torch.dtype:
    dtype = getattr(torch, config.dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


_AUTO: dict[str, Opener] = {"gguf": _open_gguf, "folder": _open_folder}
LOAD_FORMATS: dict[str, Opener] = {
    "gguf": _open_gguf,
    "safetensors": _open_safetensors,
    # Another name for the same files: what is special about it is how they are read, and ours are mapped.
    "instanttensor": _open_safetensors,
    "pt": _open_pt,
    "npcache": _open_npcache,
    "dummy": _open_dummy,
    "extensible": _open_extensible,
}
