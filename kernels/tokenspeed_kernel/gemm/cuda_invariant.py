# SPDX-License-Identifier: MIT
"""Products on Hopper whose outputs have the same bits alone and in any batch: one sum over K, in order, for each.

By the streamed kernel without shared K, some rows of x after the others, or by the wide one, whichever takes less time:
both add up panels of 64 columns by the same matrix instructions. Never chosen by rank: an override asks for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed_kernel.gemm import cuda_stream, cuda_wide
from tokenspeed_kernel.gemm.operands import Rule, dense_traits, even_eights, new_output, whole_packs
from tokenspeed_kernel.registry import Band, Platform, Requirement, kernel

_LAUNCH_US = 2.0


def rows_at_once(kind: str, tokens: int, rows: int, inputs: int) -> int:
    """Rows of x of one streamed product, or 0 where the wide product is faster. rows, inputs: of the weight."""
    slices = -(-tokens // cuda_stream.MAX_TOKENS)
    groups = cuda_stream.num_groups(-(-tokens // slices))
    cut = cuda_stream.pick_cut(kind, groups, rows, inputs, whole=True)
    stream_us = slices * (cuda_stream.cut_us(cut, groups, rows, inputs) + _LAUNCH_US)
    return 64 * groups if stream_us < cuda_wide.wide_us(tokens, rows, inputs) else 0


def _product(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    size = rows_at_once(kind, x.shape[0], *weight.shape)
    if size == 0:
        return cuda_wide.run(kind, x, weight, bias)
    out = new_output(kind, x, weight)
    for part, written in zip(x.split(size), out.split(size), strict=True):
        cuda_stream.run(kind, part, weight, bias, written, whole=True)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    return _product("linear", x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up over halves of x @ weight.T + bias."""
    return _product("gated", x, weight, bias)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    return _product("logits", x, weight, None)


def _both_built(platform: Platform) -> str | None:
    return cuda_stream.NEEDS.unmet(platform) or cuda_wide.NEEDS.unmet(platform)


def _some(tokens: int) -> bool:
    return tokens > 0


def _register(op: str, fn: Callable[..., torch.Tensor], outputs: Rule) -> None:
    kernel(
        op, name="cuda_invariant", needs=Requirement("cuda", _both_built), dtypes={torch.bfloat16},
        traits=dense_traits(_some, outputs), band=Band.PORTABLE, priority=-10, batch_invariant=True,
    )(fn)  # fmt: skip


_register("gemm.linear", linear, whole_packs)
_register("gemm.linear_silu_and_mul", linear_silu_and_mul, even_eights)
_register("gemm.logits", logits, whole_packs)
