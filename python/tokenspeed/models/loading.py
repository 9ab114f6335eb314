# SPDX-License-Identifier: MIT
"""From a resolved model to one that runs: opens the weights, builds the page, checks that nothing was left over.

Called once by the engine, on the thread that will run the model. Either everything is loaded, or ModelError says in
one line which file is at fault; no partial model exists in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.quantization import Quantization
from tokenspeed.models.model import Model
from tokenspeed.models.registry import model_class
from tokenspeed.models.shortage import Shortage
from tokenspeed.parallel import Group
from tokenspeed.weights import Weights
from tokenspeed.weights.checksums import check_sums
from tokenspeed.weights.formats import LoadPlan, open_weights, tell_inputs
from tokenspeed.weights.kv_format import KVFormat
from tokenspeed.weights.overlay import NamedTensors
from tokenspeed.weights.progress import Progress
from tokenspeed.weights.read_ahead import ReadAhead

# Tensors that checkpoints carry beside the weights: tables that are computed here, and copies of tied weights.
_COMPUTED = ("rotary_emb.inv_freq", "rope_freqs.weight")


@dataclass(frozen=True)
class LoadOptions:
    """quantization: of the weights. extra: for load formats that the user brings. kv: how keys and values are kept.
    num_read_ahead: threads that read files ahead of the loader. named_tensors: in place of the checkpoint's."""

    quantization: Quantization | None
    extra: Mapping[str, Any]
    kv: KVFormat
    num_read_ahead: int = 0
    named_tensors: NamedTensors = field(default_factory=dict)


def load_model(
    source: ModelSource,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: str = "auto",
    *,
    options: LoadOptions | None = None,
    progress: TextIO | None = None,
    group: Group | None = None,
    staged: bool = False,
) -> Model:
    """Build the model of `config` on `device` with activations in `dtype` (float32 on a CPU).

    load_format: "auto", or a key of `weights.formats.LOAD_FORMATS`. options: what the flags say, by default what the
    checkpoint says and a cache in `dtype`. progress: where the bar goes, by default stderr.
    group: the ranks that share the model, by default this one alone. staged: leave the weights on the CPU, prepared
    for `device`, as `overwrite` takes them.

    Raises ModelError: missing, damaged or surplus weights, wrong checksums or shapes, too little memory, ranks that do
    not divide the heads.
    """
    ranks = group or Group()
    page = model_class(config.architecture)
    config.check_ranks(ranks.size)
    chosen = options or LoadOptions(config.quantization, {}, KVFormat(dtype, False, None))
    where = torch.device(device)
    plan = LoadPlan(load_format, chosen.quantization, chosen.extra, where, chosen.named_tensors)
    reader = open_weights(source, config, plan)
    check_sums(reader.files())
    tell_inputs(chosen.quantization, where, dtype)
    bar = Progress("Loading weights", reader.num_tensors, progress)
    shortage = Shortage(source, where)
    try:
        with ReadAhead(reader.files(), chosen.num_read_ahead):
            model = page(config, Weights(reader, where, dtype, ranks, bar, chosen.kv, staged=staged))
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ModelError(shortage.message(error, from_files=load_format != "dummy")) from None
    extra = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.num_extra_layers))
    reader.check_all_used((*_COMPUTED, "lm_head.weight") if config.tie_word_embeddings else _COMPUTED, extra)
    bar.finish()
    return model


def _is_out_of_memory(error: RuntimeError) -> bool:
    # torch has a type for a GPU's memory only; a CPU's allocator says it in words.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
