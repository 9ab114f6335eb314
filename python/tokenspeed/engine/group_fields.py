# SPDX-License-Identifier: MIT
"""Fields of requests about process groups with trainers, checked. Pure; what is wrong is an OperationError by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.operations import text
from tokenspeed.parallel.trainer import TensorFacts, TrainerGroup

DEFAULT_GROUP = "weight_update_group"


def group_of(body: Mapping[str, Any], on_cpu: bool) -> TrainerGroup:
    """backend is by default what the engine's device needs."""
    backend = text(body, "backend", "gloo" if on_cpu else "nccl")
    if backend not in ("gloo", "nccl"):
        raise OperationError(400, f"backend: {backend!r} is not one of gloo, nccl")
    if backend == "nccl" and on_cpu:
        raise OperationError(400, "backend: nccl is between GPUs, and this engine runs on a CPU; use gloo")
    return TrainerGroup(
        name=text(body, "group_name", DEFAULT_GROUP),
        host=text(body, "master_address", None),
        port=_number(body, "master_port", 1, 65535),
        rank_offset=_number(body, "rank_offset", 1, 2**20),
        world_size=_number(body, "world_size", 2, 2**20),
        backend=backend,
    )


def facts_of(body: Mapping[str, Any]) -> list[TensorFacts]:
    """Of every tensor that comes, in order."""
    names, dtypes, shapes = (_list(body, field) for field in ("names", "dtypes", "shapes"))
    if not names:
        raise OperationError(400, "names must not be empty")
    for field, values in (("dtypes", dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise OperationError(400, f"{field}: {len(values)} for {len(names)} names")
    facts = [
        TensorFacts(_name(names, index), dtype_of(dtype, f"dtypes[{index}]"), shape_of(shape, f"shapes[{index}]"))
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes))
    ]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else None
    if twice:
        raise OperationError(400, f"names: {min(twice)!r} comes twice")
    return facts


def _list(body: Mapping[str, Any], field: str) -> list[Any]:
    values = body.get(field)
    if not isinstance(values, list):
        raise OperationError(400, f"{field} must be a list")
    return values


def _name(names: list[Any], index: int) -> str:
    if not isinstance(names[index], str) or not names[index]:
        raise OperationError(400, f"names[{index}] must be a non-empty string")
    return str(names[index])


def dtype_of(value: Any, where: str) -> torch.dtype:
    """Under the name that torch prints, with "torch." or without."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        raise OperationError(400, f"{where}: {value!r} is no dtype of torch")
    return found


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(size) is not int or not 0 <= size < 2**40 for size in value):
        raise OperationError(400, f"{where} must be a list of sizes")
    return tuple(value)


def _number(body: Mapping[str, Any], field: str, least: int, most: int) -> int:
    value = body.get(field)
    if type(value) is not int or not least <= value <= most:
        raise OperationError(400, f"{field} must be a whole number from {least} to {most}")
    return value
