# SPDX-License-Identifier: MIT
"""Tensors in a request body: a list of base64 texts, each of the bytes of a safetensors file.

Not torch's pickles, which other engines take: who unpickles a body runs whatever its sender wrote.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.flattened import metadata_of_file, unflattened

FIELD = "serialized_named_tensors"


def named_tensors(sent: Any, flattened: bool) -> dict[str, torch.Tensor]:
    """By name, on the CPU; of one name twice the later. flattened: each file holds a bucket. Raises OperationError."""
    texts = [sent] if isinstance(sent, str) else sent
    if not isinstance(texts, list) or not texts or not all(isinstance(entry, str) for entry in texts):
        raise OperationError(400, f"{FIELD} must be a list of base64 texts, each of a safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for index, entry in enumerate(texts):
        try:
            data = base64.b64decode(entry, validate=True)
            held = load(data)
        except (binascii.Error, ValueError, SafetensorError, KeyError) as error:
            raise OperationError(400, f"{FIELD}[{index}] is not a safetensors file in base64: {error}") from None
        tensors |= unflattened(held, metadata_of_file(data)) if flattened else held
    return tensors
