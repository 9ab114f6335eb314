# SPDX-License-Identifier: MIT
"""New weights in the memory of the old ones, for models whose addresses captured steps hold.

`overwrite` pairs the tensors of two models of one configuration by where they hang and copies them over. Numbers that
are no tensors are part of the captured steps, so they must be equal. Everything is checked before the first copy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tokenspeed.config.model_error import ModelError

_NUMBERS = (str, int, float)
_IGNORED = (bytes, complex, type(None), torch.device, torch.dtype, type)


def overwrite(model: object, other: object) -> None:
    """Give `model` the values of `other`, whose tensors may lie elsewhere. Raises ModelError, and changes nothing then.

    Waits until the copies are done.
    """
    ours, theirs = list(parts_of(model)), list(parts_of(other))
    for mine, yours in itertools.zip_longest(map(_kind, ours), map(_kind, theirs)):
        if mine != yours:
            place = (mine or yours)[0].removeprefix(".")
            raise ModelError(
                f"the checkpoint's weights or scales are not kept as the engine's are (the first at {place}); "
                "start an engine with it"
            )
    pairs = [(into, new) for (_, into), (_, new) in zip(ours, theirs, strict=True) if isinstance(into, torch.Tensor)]
    with torch.no_grad():
        for into, values in pairs:
            into.copy_(values)
    if any(into.is_cuda for into, _ in pairs):
        torch.cuda.synchronize()


def _kind(item: tuple[str, Any]) -> tuple[Any, ...]:
    path, part = item
    return (path, part.shape, part.dtype) if isinstance(part, torch.Tensor) else (path, part)


def parts_of(root: object) -> Iterator[tuple[str, Any]]:
    """(place, tensor or number) of all that `root` holds, each tensor once, in the order of their places."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, _NUMBERS):
            yield path, value
            continue
        if isinstance(value, _IGNORED) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        stack += [(f"{path}.{name}", part) for name, part in reversed(_members(value))]


def _members(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(name), part) for name, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    if hasattr(value, "__func__"):  # a bound method
        return [("self", value.__self__)]
    if hasattr(value, "__closure__"):
        return [(str(index), cell.cell_contents) for index, cell in enumerate(value.__closure__ or ())]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    return [*((name, getattr(value, name)) for name in slots), *getattr(value, "__dict__", {}).items()]
