# SPDX-License-Identifier: MIT
"""Random weights of every format, calls of the products that read them, and caches smaller than activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_kernel.numerics.case import Case, Dtype, normal
from tokenspeed_kernel.quant.packed import BLOCK_FORMATS, SCALED_FORMATS, InputRounding, PackedWeight, row_bytes
from tokenspeed_kernel.quant.scaled import quantize_rows, scaled_weight


def packed_weight(generator: torch.Generator, format: str, rows: int, columns: int) -> PackedWeight:
    """Random bytes whose scales are small, so that values stay near one."""
    if format in SCALED_FORMATS:
        return _scaled_weight(generator, format, rows, columns)
    block = BLOCK_FORMATS[format]
    data = torch.randint(0, 256, (rows, row_bytes(format, columns)), generator=generator, dtype=torch.uint8)
    blocks = data.view(rows, -1, block.num_bytes)
    for at, size in _SCALES[format]:
        scales = (torch.rand(blocks.shape[:2], generator=generator) + 0.5) * size
        blocks[:, :, at : at + 2] = scales.half().view(torch.uint8).view(*blocks.shape[:2], 2)
    return PackedWeight(data, format, (rows, columns))


def _scaled_weight(generator: torch.Generator, format: str, rows: int, columns: int) -> PackedWeight:
    kind, size = format.split("_b")
    groups = columns // int(size)
    scales = torch.rand(rows, groups, generator=generator) + 0.5
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    if kind == "int4":
        zeros = torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8)
        return scaled_weight("int4", codes & 15, scales * 0.02, zeros)
    if kind == "int8":
        return scaled_weight("int8", codes.view(torch.int8), scales * 0.001)
    # Without the codes of NaN, and not all of them large.
    codes[(codes & 0x7F) == 0x7F] = 0
    return scaled_weight("fp8", (codes & 0xBF).view(torch.float8_e4m3fn), scales * 0.2)


# Per format: byte offset and magnitude of each float16 in a block.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "q4_0": ((0, 0.02),),
    "q4_1": ((0, 0.02), (2, -0.15)),
    "q5_0": ((0, 0.01),),
    "q5_1": ((0, 0.01), (2, -0.15)),
    "q8_0": ((0, 0.001),),
    "q4_k": ((0, 0.0005), (2, 0.004)),
    "q5_k": ((0, 0.0003), (2, 0.004)),
    "q6_k": ((208, 0.0001),),
}


def linear(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for tokens, columns, rows, biased in ((1, 64, 33, False), (5, 96, 48, True), (17, 256, 65, False)):
        x = normal(generator, tokens, columns, dtype=dtype)
        weight = normal(generator, rows, columns, dtype=dtype, std=columns**-0.5)
        bias = normal(generator, rows, dtype=dtype) if biased else None
        yield Case("gemm.linear", f"[{tokens}, {columns}] x [{rows}, {columns}] dense", dtype, (x, weight, bias))
    for label, x, weight in _skinny(dtype, generator):
        yield Case("gemm.linear", label, dtype, (x, weight, None))
    for format in BLOCK_FORMATS:
        for tokens, rows, columns in ((1, 40, 512), (7, 33, 256)):
            x = normal(generator, tokens, columns, dtype=dtype, std=0.5)
            packed = packed_weight(generator, format, rows, columns)
            yield Case("gemm.linear", f"[{tokens}, {columns}] x {format} [{rows}, {columns}]", dtype, (x, packed, None))
    for scale in (None, 0.01):
        x, dense = normal(generator, 6, 256, dtype=dtype, std=0.5), normal(generator, 48, 256, std=0.06)
        rounded = quantize_rows(dense, InputRounding(scale))
        yield Case(
            "gemm.linear", f"fp8 x fp8, input scale {scale}", dtype, (x, rounded, normal(generator, 48, dtype=dtype))
        )


def _skinny(dtype: Dtype, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Few rows of x, as decoding has: sizes around the tiles of solutions made for that."""
    for tokens, columns, rows in ((1, 1032, 144), (8, 128, 16), (6, 512, 4256), (11, 264, 304)):
        x = normal(generator, tokens, columns, dtype=dtype)
        weight = normal(generator, rows, columns, dtype=dtype, std=columns**-0.5)
        yield f"[{tokens}, {columns}] x [{rows}, {columns}] dense", x, weight


def linear_silu(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for label, x, weight in _skinny(dtype, generator):
        yield Case("gemm.linear_silu_and_mul", label, dtype, (x, weight, None))
    x = normal(generator, 5, 96, dtype=dtype)
    weight = normal(generator, 48, 96, dtype=dtype, std=96**-0.5)
    yield Case("gemm.linear_silu_and_mul", "with a bias", dtype, (x, weight, normal(generator, 48, dtype=dtype)))
    packed = packed_weight(generator, "q8_0", 64, 512)
    x = normal(generator, 3, 512, dtype=dtype, std=0.5)
    yield Case("gemm.linear_silu_and_mul", "packed", dtype, (x, packed, None))


def linear_add(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for label, x, weight in _skinny(dtype, generator):
        residual = normal(generator, len(x), len(weight), dtype=dtype)
        yield Case("gemm.linear_add", label, dtype, (x, weight, None, residual))
    x, residual, bias = (normal(generator, *shape, dtype=dtype) for shape in ((5, 96), (5, 48), (48,)))
    weight = normal(generator, 48, 96, dtype=dtype, std=96**-0.5)
    yield Case("gemm.linear_add", "with a bias", dtype, (x, weight, bias, residual))
    args = (normal(generator, 3, 512, dtype=dtype, std=0.5), packed_weight(generator, "q8_0", 64, 512), None)
    yield Case("gemm.linear_add", "packed", dtype, (*args, normal(generator, 3, 64, dtype=dtype)))


def logits(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    for label, x, weight in _skinny(dtype, generator):
        yield Case("gemm.logits", label, dtype, (x, weight))
    args = (normal(generator, 3, 512, dtype=dtype, std=0.5), packed_weight(generator, "q4_1", 65, 512))
    yield Case("gemm.logits", "packed", dtype, args)


def embedding(dtype: Dtype, generator: torch.Generator) -> Iterator[Case]:
    ids = torch.tensor([0, 39, 7, 7, 12])
    yield Case("gemm.embedding", "dense", dtype, (ids, normal(generator, 40, 65, dtype=dtype), dtype))
    yield Case("gemm.embedding", "int32 ids", dtype, (ids.int(), normal(generator, 40, 64, dtype=dtype), dtype))
    for format in BLOCK_FORMATS:
        yield Case("gemm.embedding", format, dtype, (ids, packed_weight(generator, format, 40, 512), dtype))


def small_caches(
    generator: torch.Generator, shape: torch.Size
) -> Iterator[tuple[Dtype, tuple[torch.Tensor, torch.Tensor] | None]]:
    """Dtypes of caches smaller than activations, with scales of [num_blocks, Hk, block_size] or none."""
    yield torch.bfloat16, None
    yield torch.float8_e4m3fn, None
    first, second = (torch.rand(shape, generator=generator) + 0.5 for _ in range(2))
    yield torch.float8_e4m3fn, (first, second)
