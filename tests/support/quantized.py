# SPDX-License-Identifier: MIT
"""Small quantized checkpoints in the layouts that are published, and the dense models that they stand for.

`quantize_folder` rewrites a dense safetensors checkpoint of `transformers`: every projection becomes the tensors of a
scheme, config.json says so, and what those tensors mean comes back as float32. The arithmetic is written out here from
the formats' descriptions, apart from what the loader does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A weight [N, K] to (tensors by the last part of their names, the float32 values that they mean)."""


@dataclass(frozen=True)
class Scheme:
    """config: quantization_config. exact: whether the loader must give the values to the bit (else it rounds them)."""

    config: dict[str, Any]
    quantize: Quantizer
    exact: bool = True


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for the tensor."""
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale.reshape(())}, values.float() * scale


def fp8_static(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """With a fixed scale of the inputs."""
    tensors, dense = fp8_tensor(weight)
    return tensors | {"input_scale": torch.tensor(0.05)}, dense


def fp8_tiles(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for 128 x 128, cut at the edges."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    values, dense = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = weight[at].abs().amax() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = values[at].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, dense


def fp8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    values = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def int8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def packed_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned [N, K] to int32 [N, K * bits / 32], the first value in the lowest bits."""
    per_word = 32 // bits
    fields = values.long().unflatten(1, (-1, per_word))
    words = sum(fields[:, :, i] << (bits * i) for i in range(per_word))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def packed_int(bits: int, group: int, asymmetric: bool = False, ordered: bool = False) -> Quantizer:
    """pack-quantized: groups of `group` columns (0: the row). ordered: columns belong to groups by g_idx."""
    half = 1 << (bits - 1)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = group or columns
        group_of = torch.arange(columns) // size
        if ordered:
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        order = torch.argsort(group_of, stable=True)
        grouped = weight[:, order].unflatten(1, (-1, size))
        if asymmetric:
            low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
            scales = (high - low) / (2 * half - 1)
            zeros = (-half - low / scales).round().clamp(-half, half - 1)
        else:
            scales, zeros = grouped.abs().amax(dim=2) / (half - 0.5), torch.zeros(rows, columns // size)
        signed = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(-half, half - 1)
        values, dense = torch.empty_like(weight), torch.empty_like(weight)
        values[:, order] = signed.flatten(1)
        dense[:, order] = ((signed - zeros[:, :, None]) * scales[:, :, None]).flatten(1)
        tensors = {
            "weight_packed": packed_words(values + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if asymmetric:
            tensors["weight_zero_point"] = packed_words((zeros + half).T.contiguous(), bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = group_of.int()
        return tensors, dense

    return quantize


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest e2m1 code of each value, two a byte, and what the codes mean."""
    codes = (values.abs()[..., None] - FP4).abs().argmin(dim=-1)
    meant = FP4[codes] * values.sign()
    codes = codes + 8 * (values < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), meant


def nvfp4(divides: bool) -> Quantizer:
    """One e4m3 scale for 16 values; the tensor's own scale divides (compressed-tensors) or multiplies (ModelOpt)."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensor_scale = weight.abs().amax() / (6 * 448)
        grouped = weight.unflatten(1, (-1, 16))
        scales = (grouped.abs().amax(dim=2) / 6 / tensor_scale).to(torch.float8_e4m3fn)
        whole = (scales.float() * tensor_scale)[:, :, None]
        packed, meant = fp4_codes((grouped / whole).flatten(1))
        dense = (meant.unflatten(1, (-1, 16)) * whole).flatten(1)
        if divides:
            named = {"weight_packed": packed, "weight_global_scale": (1 / tensor_scale).reshape(1)}
        else:
            named = {"weight": packed, "weight_scale_2": tensor_scale.reshape(()), "input_scale": torch.tensor(1.0)}
        return {"weight_scale": scales} | named, dense

    return quantize


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One power of two for 32 values."""
    grouped = weight.unflatten(1, (-1, 32))
    exponents = (grouped.abs().amax(dim=2) / 6).log2().ceil()
    packed, meant = fp4_codes((grouped / exponents.exp2()[:, :, None]).flatten(1))
    dense = (meant.unflatten(1, (-1, 32)) * exponents.exp2()[:, :, None]).flatten(1)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, dense


def gptq(bits: int, group: int, v2: bool = False, symmetric: bool = True, ordered: bool = False) -> Quantizer:
    """As GPTQ's tools write it: inputs before outputs, packed along the inputs; the first layout stores zero - 1."""
    most = (1 << bits) - 1

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        group_of = torch.arange(columns) // group
        if ordered:
            group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        scales, zeros = torch.empty(columns // group, rows), torch.empty(columns // group, rows)
        for number in range(columns // group):
            part = weight[:, group_of == number]
            low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
            scales[number] = ((high - low) / most).half().float()
            zeros[number] = (-low / scales[number]).round().clamp(0, most)
        if symmetric:
            zeros[:] = (most + 1) // 2
        of_column, zero_of_column = scales[group_of].T, zeros[group_of].T
        values = (weight / of_column + zero_of_column).round().clamp(0, most)
        tensors = {
            "qweight": packed_words(values, bits).T.contiguous(),
            "qzeros": packed_words(zeros.long() - (0 if v2 else 1) & most, bits),
            "scales": scales.half(),
            "g_idx": group_of.int(),
        }
        return tensors, (values - zero_of_column) * of_column

    return quantize


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As AWQ's tools write it: inputs before outputs, packed along the outputs, in an order of its own."""
    grouped = weight.unflatten(1, (-1, 32))
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)

    def packed(fields: torch.Tensor) -> torch.Tensor:
        eights = fields.T.unflatten(1, (-1, 8))
        return packed_words(torch.stack([eights[..., i] for i in (0, 2, 4, 6, 1, 3, 5, 7)], dim=2).flatten(1), 4)

    tensors = {"qweight": packed(values.flatten(1)), "qzeros": packed(zeros), "scales": scales.T.half().contiguous()}
    return tensors, ((values - zeros[..., None]) * scales[..., None]).flatten(1)


def compressed(layout: str, kind: str, bits: int, rounds_inputs: bool = False) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group for all projections."""
    inputs = {"num_bits": bits, "type": kind, "dynamic": True, "strategy": "token"} if rounds_inputs else None
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_PACKED4, _PACKED8 = compressed("pack-quantized", "int", 4), compressed("pack-quantized", "int", 8)
SCHEMES: dict[str, Scheme] = {
    "fp8 with dynamic inputs": Scheme({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor),
    "fp8 with static inputs": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static),
    "fp8 in tiles": Scheme({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_tiles),
    "modelopt fp8": Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_static),
    "w8a8 fp8": Scheme(compressed("float-quantized", "float", 8, True), fp8_rows),
    "w8a8 int8": Scheme(compressed("int-quantized", "int", 8, True), int8_rows),
    "w4a16 groups of 32": Scheme(_PACKED4, packed_int(4, 32)),
    "w4a16 groups of 128": Scheme(_PACKED4, packed_int(4, 128)),
    "w4a16 rows": Scheme(_PACKED4, packed_int(4, 0)),
    "w4a16 with zero points": Scheme(_PACKED4, packed_int(4, 64, asymmetric=True)),
    "w4a16 with an order of columns": Scheme(_PACKED4, packed_int(4, 32, asymmetric=True, ordered=True)),
    "w4a16 groups of 16": Scheme(_PACKED4, packed_int(4, 16, asymmetric=True), exact=False),
    "w8a16 groups of 32": Scheme(_PACKED8, packed_int(8, 32)),
    "w8a16 with zero points": Scheme(_PACKED8, packed_int(8, 32, asymmetric=True), exact=False),
    "nvfp4": Scheme(compressed("nvfp4-pack-quantized", "float", 4), nvfp4(divides=True), exact=False),
    "modelopt nvfp4": Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(divides=False), exact=False),
    "gptq": Scheme(_GPTQ, gptq(4, 32)),
    "gptq with an order of columns": Scheme(_GPTQ | {"desc_act": True}, gptq(4, 32, ordered=True)),
    "gptq v2": Scheme(_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 32, v2=True, symmetric=False)),
    "gptq with zero points": Scheme(_GPTQ | {"sym": False}, gptq(4, 32, symmetric=False)),
    "gptq in 8 bits": Scheme(_GPTQ | {"bits": 8}, gptq(8, 32)),
    "awq": Scheme(_AWQ, awq),
    "mxfp4": Scheme(compressed("mxfp4-pack-quantized", "float", 4), mxfp4),
}


def quantize_folder(folder: Path, scheme: Scheme, extra: Tensors | None = None) -> Tensors:
    """Rewrite the checkpoint in `folder`; returns the dense tensors that it means now, by name."""
    file = folder / "model.safetensors"
    dense, stored = load_file(file), dict(extra or {})
    for name, tensor in list(dense.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, dense[name] = scheme.quantize(tensor.float())
        module = name.removesuffix(".weight")
        stored.update({f"{module}.{part}": value.contiguous() for part, value in parts.items()})
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return dense
