# SPDX-License-Identifier: MIT
"""Linear layers and embeddings on weights in layout "cpu_rows16"; the work is in csrc/cpu/linear.h.

Activations are float32. A row's result has the same bits alone and in any batch, for any number of threads.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel import _cpu
from tokenspeed_kernel.quant.cpu_prepare import CPU_LAYOUT, FORMAT_CODES
from tokenspeed_kernel.quant.packed import PackedWeight
from tokenspeed_kernel.registry import Band, cpu, kernel

_TRAITS = {"weight_format": FORMAT_CODES, "weight_layout": (CPU_LAYOUT,)}


@kernel(
    "gemm.linear",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits=_TRAITS,
    band=Band.NATIVE,
    batch_invariant=True,
)
def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """One chain of fused multiply-adds over K for every output. ValueError when shapes disagree."""
    num_tokens, num_values = x.shape
    num_rows, want = weight.shape
    if num_values != want:
        raise ValueError(f"x has {num_values} columns, the weight {weight.shape} needs {want}")
    if x.stride(1) != 1:
        x = x.contiguous()
    bias_at = 0
    if bias is not None:
        if bias.shape != (num_rows,) or bias.dtype is not torch.float32 or not bias.is_contiguous():
            raise ValueError(f"bias must be contiguous float32 [{num_rows}], got {bias.dtype} {tuple(bias.shape)}")
        bias_at = bias.data_ptr()
    out = x.new_empty((num_tokens, num_rows))
    _cpu.linear(
        x.data_ptr(),
        x.stride(0),
        weight.data.data_ptr(),
        FORMAT_CODES[weight.format],
        num_tokens,
        num_rows,
        num_values,
        bias_at,
        out.data_ptr(),
    )
    return out


def _whole_panels(rows_per_head: int) -> bool:
    return rows_per_head % 16 == 0


@kernel(
    "gemm.heads",
    name="cpu",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits=_TRAITS | {"rows_per_head": _whole_panels},
    band=Band.NATIVE,
    batch_invariant=True,
)
def linear_heads(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """The same chain for every output of every head. ValueError when shapes disagree."""
    num_tokens, num_heads, num_values = x.shape
    rows = out.shape[2]
    if weight.shape != (num_heads * rows, num_values) or out.shape[:2] != x.shape[:2] or out.dtype is not torch.float32:
        raise ValueError(f"x {tuple(x.shape)}, weight {weight.shape} and {out.dtype} out {tuple(out.shape)} disagree")
    if x.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the elements of a head of x and out must be adjacent")
    _cpu.heads_linear(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        weight.data.data_ptr(),
        FORMAT_CODES[weight.format],
        num_tokens,
        num_heads,
        rows,
        num_values,
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
    )


def _cut_panels(rows_per_head: int) -> bool:
    return not _whole_panels(rows_per_head)


@kernel(
    "gemm.heads",
    name="cpu_cut",
    needs=cpu(),
    dtypes=(torch.float32,),
    traits=_TRAITS | {"rows_per_head": _cut_panels},
    band=Band.PORTABLE,
    batch_invariant=True,
)
def linear_heads_cut(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
    """Where a head's outputs end inside a panel: each head's inputs through all outputs, of which its own are kept."""
    rows = out.shape[2]
    for head in range(x.shape[1]):
        out[:, head] = linear(x[:, head], weight, None)[:, head * rows : (head + 1) * rows]


@kernel("gemm.embedding", name="cpu", needs=cpu(), dtypes=(torch.float32,), traits=_TRAITS, band=Band.NATIVE)
def embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise the rows that the ids name. ValueError for an id outside the table."""
    if token_ids.dim() != 1 or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids must be int32 or int64 [T], got {token_ids.dtype} {tuple(token_ids.shape)}")
    token_ids = token_ids.contiguous()
    num_rows, num_values = weight.shape
    out = torch.empty((token_ids.shape[0], num_values), dtype=dtype)
    _cpu.embedding(
        token_ids.data_ptr(),
        token_ids.dtype is torch.int64,
        weight.data.data_ptr(),
        FORMAT_CODES[weight.format],
        token_ids.shape[0],
        num_rows,
        num_values,
        out.data_ptr(),
    )
    return out
