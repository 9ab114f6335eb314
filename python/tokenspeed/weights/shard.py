# SPDX-License-Identifier: MIT
"""One rank's part of a weight, and weights put on top of each other; dense or packed, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenspeed.config.heads import FLAG, Share, fair_share
from tokenspeed.config.model_error import ModelError
from tokenspeed.parallel.group import Group
from tokenspeed_kernel.api import BLOCK_FORMATS, PackedWeight, Weight, in_blocks_of_32


def own_rows(weight: Weight, group: Group, where: str, share: Share | None = None) -> Weight:
    """Our share of the outputs; by default a fair one."""
    if group.size == 1:
        return weight
    part = share or _share(weight.shape[0], group, where)
    rows = slice(part.start, part.start + part.count)
    if isinstance(weight, PackedWeight):
        return replace(weight, data=weight.data[rows], shape=(part.count, weight.shape[1]))
    return weight[rows]


def own_columns(weight: Weight, group: Group, where: str, share: Share | None = None) -> Weight:
    """Our share of the inputs; by default a fair one."""
    if group.size == 1:
        return weight
    part = share or _share(weight.shape[1], group, where)
    start, count = part.start, part.count
    if not isinstance(weight, PackedWeight):
        return weight[:, start : start + count].contiguous()
    if weight.columns is not None:
        raise ModelError(
            f"{where}: its columns are ordered by group (act-order), so no rank's share of inputs has whole groups; "
            f"use {FLAG} 1 or a variant quantized without act-order"
        )
    if _is_cut(weight, part):
        weight = in_blocks_of_32(weight)
    block = BLOCK_FORMATS[weight.format]
    if _is_cut(weight, part):
        raise ModelError(
            f"{where}: {count} columns for each of {group.size} ranks are not whole {weight.format} blocks of "
            f"{block.num_values}; use fewer ranks ({FLAG}) or another quantization"
        )
    first, width = (number // block.num_values * block.num_bytes for number in (start, count))
    data = weight.data[:, first : first + width].contiguous()
    return replace(weight, data=data, shape=(weight.shape[0], count))


def _is_cut(weight: PackedWeight, part: Share) -> bool:
    """Whether the part begins or ends inside a block."""
    size = BLOCK_FORMATS[weight.format].num_values
    return bool(part.start % size or part.count % size)


def stack(weights: list[Weight]) -> list[Weight]:
    """Neighbours of one format become one weight with the outputs of both; the others stay apart."""
    stacked: list[Weight] = []
    for weight in weights:
        merged = _merge(stacked[-1], weight) if stacked else None
        if merged is None:
            stacked.append(weight)
        else:
            stacked[-1] = merged
    return stacked


def _merge(above: Weight, below: Weight) -> Weight | None:
    if isinstance(above, PackedWeight) and isinstance(below, PackedWeight):
        alike = (above.format, above.layout, above.rounding) == (below.format, below.layout, below.rounding)
        if not alike or not _same(above.columns, below.columns):
            return None
        shape = (above.shape[0] + below.shape[0], above.shape[1])
        return replace(above, data=torch.cat([above.data, below.data]), shape=shape)
    if isinstance(above, torch.Tensor) and isinstance(below, torch.Tensor) and above.dtype == below.dtype:
        return torch.cat([above, below])
    return None


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _share(size: int, group: Group, where: str) -> Share:
    if size < group.size:
        raise ModelError(f"{where}: size {size} is too small for {group.size} ranks; use another {FLAG}")
    return fair_share(size, group.rank, group.size)


def check_even(size: int, group: Group, where: str) -> None:
    """Raise ModelError for what does not divide: kernels of GPUs want rows of whole vectors."""
    if size % group.size:
        raise ModelError(f"{where}: size {size} does not divide among {group.size} ranks; use another {FLAG}")
