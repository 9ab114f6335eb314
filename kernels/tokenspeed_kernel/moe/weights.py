# SPDX-License-Identifier: MIT
"""The weights of a layer's experts as values: one matrix of every expert, and what a whole layer needs.

An `ExpertMatrix` is to `moe.experts` what a `Weight` is to `gemm.linear`: `moe.prepare` turns the experts' weights
into one, in the device's own layout, once at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from tokenspeed_kernel.quant.packed import BLOCKS_LAYOUT, ROWS_LAYOUT, PackedWeight, Weight

ActivationKind = Literal["silu", "swiglu_clamped"]


@dataclass(frozen=True)
class GatedActivation:
    """Gate and up to one value.

    "silu": silu(gate) * up. "swiglu_clamped" (gpt-oss): g * sigmoid(alpha * g) * (u + 1), where g is the gate held
    below `limit` and u is up held within [-limit, limit].
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.0
    limit: float = float("inf")


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix [N, K] of each of E experts.

    data: in layout "rows" the dense [E, N, K]; in "blocks" uint8 [E, N, row_bytes]; else the layout's bytes, uint8
        [E, bytes of one expert].
    format: a key of BLOCK_FORMATS, or a dense dtype's name.
    shape: (E, N, K).
    """

    data: torch.Tensor
    format: str
    shape: tuple[int, int, int]
    layout: str

    def experts(self) -> Iterator[Weight]:
        """Each expert's weight as `gemm.linear` knows it. ValueError for a layout of a device."""
        if self.layout == ROWS_LAYOUT:
            yield from self.data.unbind(0)
        elif self.layout == BLOCKS_LAYOUT:
            for data in self.data.unbind(0):
                yield PackedWeight(data, self.format, self.shape[1:])
        else:
            raise ValueError(f"experts in layout {self.layout!r} cannot be taken apart")


@dataclass(frozen=True)
class Experts:
    """The feed-forward networks of a layer: down(activation(gate(x), up(x))) of every expert, biases where given.

    gate_up: one matrix with the I rows of gate above the I rows of up; or gate and up apart, where a file packs
        them in different formats. down: [E, H, I].
    gate_up_bias: [E, 2 * I] or None; down_bias: [E, H] or None, in the activations' dtype.
    """

    gate_up: tuple[ExpertMatrix, ...]
    down: ExpertMatrix
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: GatedActivation

    @cached_property
    def traits(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """(formats, layouts, activation) as selection sees them: gate and up first, down last."""
        matrices = (*self.gate_up, self.down)
        return tuple(m.format for m in matrices), tuple(m.layout for m in matrices), self.activation.kind
