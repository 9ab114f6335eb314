# SPDX-License-Identifier: MIT
"""Experts' matrices out of a checkpoint: one tensor an expert, or all experts in one tensor, dense or packed.

They are read one expert at a time, sharded like a dense network's (gate and up by outputs, down by inputs), gate is
put on top of up, and the device's `moe.prepare` takes them one after the other, so that no layer is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tokenspeed.config.heads import fair_share
from tokenspeed.config.model_error import ModelError
from tokenspeed.parallel import Group
from tokenspeed.weights.scope import Weights
from tokenspeed.weights.shard import check_even, own_columns, own_rows, stack
from tokenspeed_kernel import api
from tokenspeed_kernel.api import ExpertMatrix, Weight

ExpertSource = Callable[[int], Weight]
"""From an expert's number to its matrix [N, K], whole, on the CPU."""


@dataclass(frozen=True)
class ExpertNames:
    """Modules of an expert's matrices, under "experts.N" or, with all experts in one tensor, under "experts"."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def named_source(weights: Weights, name: str, num_experts: int, shape: tuple[int, int]) -> ExpertSource:
    """The matrices that the checkpoint calls `name`. Raises ModelError, at the call where a tensor is at fault."""
    reader, prefix = weights.reader, f"{weights.prefix}experts."
    if not weights.has(f"experts.{name}.weight") or weights.has(f"experts.0.{name}.weight"):

        def one(expert: int) -> Weight:
            weights.progress.advance()
            return reader.read(f"{prefix}{expert}.{name}.weight", shape)

        return one
    matrices = reader.read_stack(f"{prefix}{name}.weight", (num_experts, *shape))
    weights.progress.advance()
    return matrices.__getitem__


def load_experts(
    weights: Weights, num_experts: int, gate: ExpertSource, up: ExpertSource, down: ExpertSource
) -> tuple[tuple[ExpertMatrix, ...], ExpertMatrix]:
    """This rank's part of a layer's experts, (gate and up, down) as `api.Experts` holds them. Raises ModelError."""
    where = f"{weights.prefix}experts"
    gate, up, down = (_plain(source, where) for source in (gate, up, down))
    if weights.device.type != "cpu":
        check_even(gate(0).shape[0], weights.group, where)

    def prepare(experts: Iterator[Weight]) -> ExpertMatrix:
        try:
            return weights.kept(api.prepare_experts(experts, num_experts, weights.device, weights.dtype))
        except ValueError as error:
            raise ModelError(f"{where}: {error}") from None

    def gate_and_up(expert: int) -> list[Weight]:
        return stack([own_rows(source(expert), weights.group, f"{where}.{expert}") for source in (gate, up)])

    # Two only where the file packs gate and up in different formats.
    num_parts = len(gate_and_up(0))
    parts = [prepare(gate_and_up(expert)[part] for expert in range(num_experts)) for part in range(num_parts)]
    downs = (own_columns(down(expert), weights.group, f"{where}.{expert}") for expert in range(num_experts))
    return _merged(parts), prepare(downs)


def _plain(source: ExpertSource, where: str) -> ExpertSource:
    """Expert kernels neither round inputs nor take their columns in another order."""

    def one(expert: int) -> Weight:
        weight = source(expert)
        if isinstance(weight, torch.Tensor):
            return weight
        if weight.columns is not None:
            raise ModelError(
                f"{where}.{expert}: columns ordered by group (act-order) are not supported in experts; "
                "use a variant quantized without act-order"
            )
        return replace(weight, rounding=None)

    return one


def _merged(parts: list[ExpertMatrix]) -> tuple[ExpertMatrix, ...]:
    """Gate on top of up where the device dequantised both."""
    if len(parts) == 1 or any(part.layout != "rows" for part in parts):
        return tuple(parts)
    data = torch.cat([part.data for part in parts], dim=1)
    return (ExpertMatrix(data, parts[0].format, (data.shape[0], data.shape[1], data.shape[2]), "rows"),)


def own_bias(bias: torch.Tensor, group: Group) -> torch.Tensor:
    """Our part of gate's or up's biases [E, I]."""
    part = fair_share(bias.shape[1], group.rank, group.size)
    return bias[:, part.start : part.start + part.count]
