# SPDX-License-Identifier: MIT
"""A rank's part of the model, as the flags want it: loaded at start, and beside the running engine for new weights.

Made once by `core`. `load` is called by the thread that builds, `load_beside` by whichever thread brings new weights.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenspeed.config.flags import FlagError
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config
from tokenspeed.engine.new_weights import SentTensors, WeightsFrom
from tokenspeed.engine.ranks import Ranks
from tokenspeed.layers.cache import LayerCache
from tokenspeed.models import KVFormat, LoadOptions, kv_factors, load_model
from tokenspeed.models.model import Model


class ModelLoader:
    """Raises ModelError for a file of scales that cannot be used."""

    def __init__(self, config: Config, model_config: ModelConfig, ranks: Ranks) -> None:
        self.sent = SentTensors()
        """What `load_beside` puts in front of a checkpoint."""
        self._config = config
        self._served = model_config.serving(config.scheduler.max_model_len)
        self._options = load_options(config, model_config.num_layers)
        self._device = torch.device(config.device.device)
        self._dtype: torch.dtype = getattr(torch, config.device.dtype)
        self._group = ranks.group
        self._bar = None if ranks.leads else io.StringIO()

    def load(self, source: ModelSource) -> Model:
        """Raises ModelError."""
        return load_model(
            source,
            self._served,
            self._device,
            self._dtype,
            self._config.loader.load_format,
            options=self._options,
            progress=self._bar,
            group=self._group,
        )

    def load_beside(self, other: WeightsFrom) -> Model:
        """For a GPU the weights stay in the host's memory, as `models.overwrite` takes them. Raises ModelError."""
        with torch.no_grad():  # the mode is a thread's own
            return load_model(
                other.source,
                self._served,
                self._device,
                self._dtype,
                other.load_format,
                options=replace(self._options, named_tensors=self.sent.of(other)),
                progress=self._bar,
                group=self._group,
                staged=self._device.type != "cpu",
            )

    def caches(self, model: Model) -> list[LayerCache]:
        """What each layer keeps of past tokens. Raises FlagError where that cannot be kept as the flags want it."""
        layers = model.kv_cache(self._config.memory.block_size)
        _check_cache(layers, self._options.kv, self._served.architecture)
        return layers


def load_options(config: Config, num_layers: int) -> LoadOptions:
    """What the model is loaded with. Raises ModelError for a file of scales that cannot be used."""
    path = config.kv_cache.param_path
    factors = None if path is None else kv_factors(path, num_layers)
    kv = KVFormat(getattr(torch, config.kv_cache.dtype), config.kv_cache.per_token_head, factors)
    return LoadOptions(config.loader.quantization, config.loader.extra, kv, config.loader.num_read_ahead)


def _check_cache(layers: Sequence[LayerCache], kv: KVFormat, architecture: str) -> None:
    """A layer with a cache of its own kind may not know the dtype that was asked for."""
    if kv.is_fp8 and not all(any(tensor.dtype == kv.dtype for tensor in layer) for layer in layers):
        raise FlagError("--kv-cache-dtype", f"fp8_e4m3: the cache of {architecture} cannot be kept in it; use auto")
    if kv.per_token_head and any(len(layer) < 4 for layer in layers):
        raise FlagError("--kv-cache-quant-method", f"per_token_head: {architecture} caches no heads; use none")
