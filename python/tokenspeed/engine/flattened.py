# SPDX-License-Identifier: MIT
"""`load_format: flattened_bucket`: many tensors as one row of bytes, as SGLang's trainers send them.

The row is one tensor, `flattened_tensor`; `metadata` says of each tensor within it its name, shape, dtype, and where it
begins and ends, in elements of the row (bytes, where the row is uint8). Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.group_fields import dtype_of, shape_of

FLATTENED = "flattened_bucket"
ROW, METADATA = "flattened_tensor", "metadata"
_FIELDS = ("name", "shape", "dtype", "start_idx", "end_idx")


def is_flattened(load_format: Any) -> bool:
    """Whether the tensors of an update come as a bucket. Raises OperationError for any other format than none."""
    if load_format not in (None, FLATTENED):
        raise OperationError(400, f"load_format: {load_format!r} is not {FLATTENED}")
    return load_format == FLATTENED


def metadata_of_file(data: bytes) -> Any:
    """What a safetensors file carries as `metadata`, which is JSON."""
    try:
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return json.loads(head["__metadata__"][METADATA])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OperationError(400, f"{FLATTENED}: the file's __metadata__ has no {METADATA} in JSON") from None


def unflattened(bucket: Mapping[str, Any], metadata: Any) -> dict[str, torch.Tensor]:
    """The tensors, copied. Raises OperationError by the entry at fault."""
    row = bucket.get(ROW)
    if not isinstance(row, torch.Tensor) or row.dim() != 1 or len(bucket) != 1:
        raise OperationError(400, f"{FLATTENED}: there must be one tensor of one dimension, {ROW}")
    if not isinstance(metadata, Sequence) or isinstance(metadata, str):
        raise OperationError(400, f"{METADATA} must be a list")
    return dict(_one(row, entry, index) for index, entry in enumerate(metadata))


def _one(row: torch.Tensor, entry: Any, index: int) -> tuple[str, torch.Tensor]:
    where = f"{METADATA}[{index}]"
    if isinstance(entry, Mapping):
        name, sent_shape, sent_dtype, start, end = (entry.get(field) for field in _FIELDS)
    else:
        name, sent_shape, sent_dtype, start, end = (getattr(entry, field, None) for field in _FIELDS)
    if not isinstance(name, str) or not name:
        raise OperationError(400, f"{where}: name must be a non-empty string")
    shape = shape_of(list(sent_shape) if isinstance(sent_shape, (tuple, torch.Size)) else sent_shape, f"{where}.shape")
    dtype = dtype_of(str(sent_dtype), f"{where}.dtype")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(row):
        raise OperationError(400, f"{where}: start_idx and end_idx must lie in [0, {len(row)}], in order")
    if (end - start) * row.element_size() != math.prod(shape) * dtype.itemsize:
        raise OperationError(400, f"{where}: {name!r} has {(end - start) * row.element_size()} bytes, not its shape's")
    # A copy, since a view of other elements must begin at a multiple of their size.
    piece = row[start:end].to("cpu", copy=True).contiguous()
    return name, piece.view(torch.uint8).view(dtype).reshape(shape)
