# SPDX-License-Identifier: MIT
"""Weights of a GGUF file, memory-mapped; packed types stay packed.

In llama-architecture files the rows of q and k are permuted so that the two elements of a rotary pair are
neighbours. Our kernels pair element i with i + D/2, as checkpoints do, so the rows are put back here; a row keeps
its bytes, so this works on packed types.
"""

from __future__ import annotations

import logging
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.config.gguf import GGUFTensor, read_gguf
from tokenspeed.config.model_error import ModelError
from tokenspeed.weights import fp4
from tokenspeed.weights.low_bits import decode_q2_k, q6_k_of_q3_k
from tokenspeed.weights.names import NameTable
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import BLOCK_FORMATS, PackedWeight, Weight, dequantize

logger = logging.getLogger("tokenspeed.weights")

_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_DECODED = ("mxfp4", "q2_k")
_PERMUTED_ARCHITECTURES = ("llama",)


@dataclass(frozen=True)
class HeadCounts:
    """Rows of q and k belong to this many heads."""

    num_heads: int
    num_kv_heads: int


class GGUFReader(WeightReader):
    """Tensors of one file. They stay valid while referenced, also after the reader is gone."""

    def __init__(self, path: Path, heads: HeadCounts) -> None:
        super().__init__()
        self._file = read_gguf(path)
        architecture = self._file.metadata.get("general.architecture", "")
        self._names_table = NameTable(architecture)
        self._by_name = {self._names_table.checkpoint(name): tensor for name, tensor in self._file.tensors.items()}
        self._told = False
        permuted = architecture in _PERMUTED_ARCHITECTURES
        self._permuted_heads = (
            {"self_attn.q_proj": heads.num_heads, "self_attn.k_proj": heads.num_kv_heads} if permuted else {}
        )
        with path.open("rb") as file:
            # Private: torch asks for a writable buffer, and nothing is ever written through it.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def num_tensors(self) -> int:
        return len(self._by_name)

    def has(self, name: str) -> bool:
        return name in self._by_name or self._halves(name) is not None

    def where(self, name: str) -> str:
        return f"{self._file.path}: tensor {self._names_table.gguf(name)!r}"

    def files(self) -> list[Path]:
        return [self._file.path]

    def _names(self) -> set[str]:
        return set(self._by_name)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        halves = self._halves(name)
        if halves is not None:
            self._used.update(halves)
            if name not in self._by_name:
                return self._joined(*halves)
        tensor = self._by_name[name]
        self._require_shape(name, tensor.shape, shape)
        heads = self._permuted_heads.get(_module(name))
        if tensor.type in _DENSE:
            dense = self._bytes(tensor).view(_DENSE[tensor.type]).view(tensor.shape)
            return dense if heads is None else half_split_rows(dense, heads)
        if tensor.type in _DECODED:
            decoded = self._decoded(tensor)
            return decoded if heads is None else half_split_rows(decoded, heads)
        self._require_packed(name, tensor, 2)
        rows, kind = self._rows(tensor)
        if heads is not None:
            rows = half_split_rows(rows, heads)
        return PackedWeight(rows, kind, (tensor.shape[0], tensor.shape[1]))

    def read_stack(self, name: str, shape: tuple[int, int, int]) -> list[Weight]:
        """Packed experts are rows after rows, so each one's bytes lie together."""
        self._require(name)
        tensor = self._by_name[name]
        if tensor.type in _DENSE or tensor.type in _DECODED:
            return super().read_stack(name, shape)
        self._require_packed(name, tensor, 3)
        self._require_shape(name, tensor.shape, shape)
        self._used.add(name)
        stacked, kind = self._rows(tensor)
        return [PackedWeight(rows, kind, shape[1:]) for rows in stacked.view(*shape[:2], -1).unbind(0)]

    def _halves(self, name: str) -> tuple[str, str] | None:
        """Newer files of DeepSeek have kv_b_proj's keys, transposed, and values apart; some have all three."""
        if not name.endswith("self_attn.kv_b_proj.weight"):
            return None
        prefix = self._names_table.gguf(name).removesuffix("attn_kv_b.weight")
        keys, values = f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight"
        return (keys, values) if keys in self._by_name and values in self._by_name else None

    def _joined(self, keys: str, values: str) -> torch.Tensor:
        """[H, latent, nope] and [H, value, latent] as [H * (nope + value), latent]."""
        parts = [self._dense(keys).transpose(1, 2), self._dense(values)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _dense(self, name: str) -> torch.Tensor:
        """Any tensor's values, float32."""
        tensor = self._by_name[name]
        if tensor.type in _DENSE:
            return self._bytes(tensor).view(_DENSE[tensor.type]).view(tensor.shape).float()
        if tensor.type in _DECODED:
            return self._decoded(tensor).float()
        self._require_packed(name, tensor, 3)
        rows, kind = self._rows(tensor)
        values = dequantize(PackedWeight(rows, kind, (rows.shape[0], tensor.shape[-1])))
        return values.view(tensor.shape).float()

    def _rows(self, tensor: GGUFTensor) -> tuple[torch.Tensor, str]:
        """The bytes of each row of a packed tensor, and the type that kernels know them by."""
        rows = self._bytes(tensor).view(math.prod(tensor.shape[:-1]), -1)
        return (q6_k_of_q3_k(rows), "q6_k") if tensor.type == "q3_k" else (rows, tensor.type)

    def _decoded(self, tensor: GGUFTensor) -> torch.Tensor:
        """The values of a type that no kernel multiplies."""
        if not self._told:
            self._told = True
            logger.info("%s weights are decoded: no kernel here multiplies them as they are", tensor.type)
        if tensor.type == "q2_k":
            return decode_q2_k(self._rows(tensor)[0]).view(tensor.shape)
        # A block of mxfp4 is its exponent, then sixteen bytes: the low nibbles are its first half.
        blocks = self._bytes(tensor).view(*tensor.shape[:-1], -1, 17)
        codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=-1)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        return fp4.decode_mxfp4(pairs.flatten(-2), blocks[..., 0])

    def _require_packed(self, name: str, tensor: GGUFTensor, num_dimensions: int) -> None:
        if tensor.type not in (*BLOCK_FORMATS, "q3_k") or len(tensor.shape) != num_dimensions:
            known = ", ".join((*_DENSE, *_DECODED, "q3_k", *BLOCK_FORMATS))
            raise ModelError(
                f"{self.where(name)} has type {tensor.type}, which is not supported ({known}); "
                "use a file with another quantization"
            )

    def _bytes(self, tensor: GGUFTensor) -> torch.Tensor:
        return torch.frombuffer(self._data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)


def half_split_rows(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from neighbouring rotary pairs (0, D/2, 1, D/2 + 1, ...) to checkpoint order.

    rows: [num_heads * D, ...] of any dtype. Returns a copy.
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _module(name: str) -> str:
    """The last two parts of a weight's or bias's module: "self_attn.q_proj"."""
    return ".".join(name.split(".")[-3:-1])
