# SPDX-License-Identifier: MIT
"""Mixtures of experts on the CPU; the work is in csrc/cpu/moe.cc and experts.h.

Experts' weights stay packed, each expert's sixteen rows side by side as in layout "cpu_rows16". A step reads the
weights of the experts that its tokens chose and no others. A token's result has the same bits alone and in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.moe.routing import Routing
from tokenspeed_kernel.moe.weights import ExpertMatrix, Experts
from tokenspeed_kernel.quant.cpu_prepare import CPU_LAYOUT, FORMAT_CODES, pack_into, packed_buffer
from tokenspeed_kernel.quant.packed import Weight, weight_traits
from tokenspeed_kernel.registry import Band, cpu, kernel

# Bounds what a long prefill needs beside its activations; it runs in parts of so many tokens.
_SCRATCH_FLOATS = 32 << 20


def _ours(layouts: tuple[str, ...]) -> bool:
    return all(layout == CPU_LAYOUT for layout in layouts)


@kernel(
    "moe.prepare",
    name="cpu_rows16",
    needs=cpu(),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    traits={"weight_format": FORMAT_CODES},
    band=Band.NATIVE,
)
def prepare(experts: Iterable[Weight], num_experts: int, device: torch.device, dtype: torch.dtype) -> ExpertMatrix:
    """Every expert packed into its place of one buffer; nothing is dequantised."""
    data: torch.Tensor | None = None
    format, shape = "", (0, 0)
    for index, weight in enumerate(experts):
        if data is None:
            format, shape = weight_traits(weight)[0], (weight.shape[0], weight.shape[1])
            num_bytes = -(-_cpu.packed_bytes(FORMAT_CODES[format], *shape) // 64) * 64
            data = packed_buffer(num_experts * num_bytes).view(num_experts, num_bytes)
        pack_into(weight, data[index])
    assert data is not None  # held by the api
    return ExpertMatrix(data, format, (num_experts, *shape), CPU_LAYOUT)


@kernel("moe.route", name="cpu", needs=cpu(), dtypes=(torch.float32,), band=Band.NATIVE)
def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float32. ValueError for shapes that disagree."""
    num_tokens, num_experts = logits.shape
    if num_experts != routing.num_experts:
        raise ValueError(f"logits have {num_experts} columns for {routing.num_experts} experts")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32)
    experts = torch.empty((num_tokens, routing.top_k), dtype=torch.int32)
    _cpu.route(
        logits.data_ptr(),
        logits.stride(0),
        0 if bias is None else _address(bias, (num_experts,), "bias"),
        num_tokens,
        _rule(routing),
        weights.data_ptr(),
        experts.data_ptr(),
    )
    return weights, experts


@functools.lru_cache(maxsize=64)
def _rule(routing: Routing) -> Any:
    return _cpu.RouteRule(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        sigmoid=routing.scores == "sigmoid",
        best_two=routing.group_score == "best_two",
        renormalize=routing.renormalize,
        scale=routing.scale,
    )


@kernel(
    "moe.experts",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits={"weight_layouts": _ours},
    band=Band.NATIVE,
    batch_invariant=True,
)
def run_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Tokens sorted by expert, two grouped products, a sum in the order of choice. ValueError: shapes disagree."""
    layer = _layer(experts)
    num_tokens, hidden = x.shape
    if hidden != experts.gate_up[0].shape[2]:
        raise ValueError(f"x has {hidden} columns, the experts {experts.gate_up[0].shape} need another number")
    if x.stride(1) != 1:
        x = x.contiguous()
    top_k = chosen.shape[1]
    if chosen.dtype is not torch.int32 or not chosen.is_contiguous():
        raise ValueError(f"chosen must be contiguous int32, got {chosen.dtype}")
    _address(weights, (num_tokens, top_k), "weights")
    num_outputs, inner = experts.down.shape[1:]
    row_floats = top_k * (max(hidden, num_outputs) + 2 * inner)
    part = max(1, min(num_tokens, _SCRATCH_FLOATS // row_floats))
    gate_up_rows = x.new_empty(part * top_k * 2 * inner)
    hidden_rows = x.new_empty(part * top_k * max(hidden, num_outputs))
    out = x.new_empty((num_tokens, num_outputs))
    for begin in range(0, num_tokens, part):
        _cpu.experts(
            layer,
            x[begin:].data_ptr(),
            x.stride(0),
            weights[begin:].data_ptr(),
            chosen[begin:].data_ptr(),
            min(part, num_tokens - begin),
            top_k,
            gate_up_rows.data_ptr(),
            hidden_rows.data_ptr(),
            out[begin:].data_ptr(),
        )
    return out


def _layer(experts: Experts) -> Any:
    """What the C++ side knows of the layer, made at the first call and kept with it. ValueError: shapes disagree."""
    known = experts.__dict__.get("_cpu_layer")
    if known is None:
        known = experts.__dict__["_cpu_layer"] = _make_layer(experts)
    return known


def _make_layer(experts: Experts) -> Any:
    num_experts, num_outputs, inner = experts.down.shape
    rows = sum(matrix.shape[1] for matrix in experts.gate_up)
    alike = {(matrix.shape[0], matrix.shape[2]) for matrix in experts.gate_up}
    if rows != 2 * inner or len(alike) != 1 or experts.gate_up[0].shape[0] != num_experts:
        shapes = ", ".join(str(matrix.shape) for matrix in experts.gate_up)
        raise ValueError(f"gate and up {shapes} do not go with down {experts.down.shape}")
    up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    return _cpu.ExpertLayer(
        num_experts=num_experts,
        gate_up=[_matrix(matrix) for matrix in experts.gate_up],
        down=_matrix(experts.down),
        gate_up_bias=0 if up_bias is None else _address(up_bias, (num_experts, 2 * inner), "gate_up_bias"),
        down_bias=0 if down_bias is None else _address(down_bias, (num_experts, num_outputs), "down_bias"),
        clamped=experts.activation.kind == "swiglu_clamped",
        alpha=experts.activation.alpha,
        limit=experts.activation.limit,
    )


def _matrix(matrix: ExpertMatrix) -> Any:
    return _cpu.ExpertMatrix(
        data=matrix.data.data_ptr(),
        format=FORMAT_CODES[matrix.format],
        expert_bytes=matrix.data.stride(0),
        num_rows=matrix.shape[1],
        num_columns=matrix.shape[2],
    )


def _address(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> int:
    if tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.data_ptr()
