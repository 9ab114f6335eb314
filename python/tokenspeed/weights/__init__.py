# SPDX-License-Identifier: MIT
"""From files to the tensors of layers: readers of each format, names, sharding, preparation for the device."""

from tokenspeed.weights.kv_format import KVFormat, kv_factors
from tokenspeed.weights.overlay import NamedTensors
from tokenspeed.weights.reader import WeightReader
from tokenspeed.weights.scope import Weights

__all__ = ["KVFormat", "NamedTensors", "WeightReader", "Weights", "kv_factors"]
