# SPDX-License-Identifier: MIT
"""Architectures, each a page of layers, and the function that loads one."""

from tokenspeed.models.loading import LoadOptions, load_model
from tokenspeed.models.model import Model
from tokenspeed.models.overwrite import overwrite, parts_of
from tokenspeed.models.registry import model_class
from tokenspeed.weights import KVFormat, NamedTensors, kv_factors

__all__ = [
    "KVFormat",
    "LoadOptions",
    "Model",
    "NamedTensors",
    "kv_factors",
    "load_model",
    "model_class",
    "overwrite",
    "parts_of",
]
