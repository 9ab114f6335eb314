# SPDX-License-Identifier: MIT
"""Quantized checkpoints: a module's values, scales, zero points and order of columns become one weight.

Stands in front of the reader of the files, as which it answers to the names of dense checkpoints: who asks for
"...q_proj.weight" gets a PackedWeight, wherever its parts lie. Layouts are those that `transformers`,
compressed-tensors and ModelOpt write. What no kernel keeps packed is decoded here, and the log says so once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed.config.quantization import QuantGroup, Quantization
from tokenspeed.weights import fp4
from tokenspeed.weights.folder_reader import FolderReader
from tokenspeed.weights.reader import WeightReader
from tokenspeed_kernel.api import InputRounding, PackedWeight, Weight, block_size, quantize_rows, scaled_weight

logger = logging.getLogger("tokenspeed.weights")

# Parts of a module beside its weight that are read with it, or that say what inputs and caches are rounded to.
WEIGHT_PARTS = (
    "weight_packed",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "input_scale",
    "input_global_scale",
)
UNREAD_PARTS = ("input_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale")
"""Ends of names that may stay unread: they concern what runs in full precision here."""


class QuantizedReader(WeightReader):
    """dtype: of weights that are decoded while loading."""

    def __init__(self, inner: FolderReader, quantization: Quantization, dtype: torch.dtype) -> None:
        super().__init__()
        self._inner = inner
        self._quantization = quantization
        self._dtype = dtype
        self._told: set[str] = set()

    @property
    def num_tensors(self) -> int:
        return sum(name.endswith(_COUNTED) for name in self._inner.names())

    def has(self, name: str) -> bool:
        packed = name.endswith(".weight") and self._packed(_module(name)) is not None
        return packed or self._inner.has(name) or self._inner.has(f"{name}_blocks")

    def where(self, name: str) -> str:
        packed = self._packed(_module(name)) if name.endswith(".weight") else None
        return self._inner.where(name if packed is None else f"{_module(name)}.{packed}")

    def _packed(self, module: str) -> str | None:
        """What the module's packed weight is called; None when it has none."""
        return next((part for part in ("weight_packed", "qweight") if self._inner.has(f"{module}.{part}")), None)

    def files(self) -> list[Path]:
        return self._inner.files()

    def scalar(self, name: str) -> float | None:
        return self._inner.scalar(name)

    def check_all_used(self, endings: tuple[str, ...], beginnings: tuple[str, ...]) -> None:
        super().check_all_used(endings, beginnings)
        self._inner.check_parts_used(endings, beginnings)

    def _names(self) -> set[str]:
        return {name for name in self._inner.names() if not name.endswith(UNREAD_PARTS)}

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        module = _module(name)
        if self._inner.has(f"{name}_blocks"):
            return self._mxfp4_stack(name)
        if not name.endswith(".weight"):
            return self._inner.read(name, shape)
        self._used.update(f"{module}.{part}" for part in WEIGHT_PARTS)
        packed = self._packed(module)
        stored = self._part(module, packed or "weight")
        if packed is None and stored.dtype in _DENSE:
            return self._dense(name, stored)
        group = self._quantization.group_of(module)
        if group is None:
            raise ModelError(
                f"{self.where(name)} is quantized, but quantization_config has no group for it; "
                "config.json and weights do not belong together"
            )
        try:
            return self._decoders()[group.kind](module, stored, group)
        except (ValueError, RuntimeError) as error:
            first_line = str(error).splitlines()[0]
            raise ModelError(
                f"{self.where(name)}: its {group.kind} parts do not fit together ({first_line}); download it again"
            ) from None

    def _decoders(self) -> dict[str, Callable[[str, torch.Tensor, QuantGroup], Weight]]:
        return {
            "fp8": self._fp8,
            "int8": self._int8,
            "int4": self._int4,
            "nvfp4": self._nvfp4,
            "mxfp4": self._mxfp4,
            "gptq": self._gptq,
            "gptq_v2": self._gptq,
            "awq": self._awq,
        }

    def _dense(self, name: str, stored: torch.Tensor) -> Weight:
        if not self._quantization.online or not is_projection(name, stored.shape):
            return stored
        if block_size(stored.shape[1], stored.shape[1]) is None:
            self._tell(f"weights of {stored.shape[1]} inputs stay as they are: fp8 needs a multiple of 32")
            return stored
        return quantize_rows(stored, InputRounding(None))

    def _fp8(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        if stored.dtype != torch.float8_e4m3fn:
            raise ValueError(f"the weight has dtype {stored.dtype}")
        name = "weight_scale_inv" if self._inner.has(f"{module}.weight_scale_inv") else "weight_scale"
        scales = _spread(self._part(module, name), stored.shape, group.tile)
        rounding = InputRounding(self._input_scale(module)) if group.rounds_inputs else None
        if block_size(stored.shape[1], stored.shape[1] // scales.shape[1]) is None:
            return self._decoded("fp8", stored.float(), scales)
        return scaled_weight("fp8", stored, scales, rounding=rounding)

    def _int8(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        values = stored
        if stored.dtype == torch.int32:
            values = (_fields(stored, 8) - 128)[:, : self._num_columns(module)].to(torch.int8)
        scales = _spread(self._part(module, "weight_scale"), values.shape, group.tile)
        return self._in_8_bits(values, scales, self._zeros(module, scales.shape, 8), self._group_of_columns(module))

    def _in_8_bits(
        self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor | None
    ) -> Weight:
        """values: int8. zeros: signed. groups: of the columns, or None where they lie one after the other."""
        values, columns = _sorted(values, groups)
        if zeros is not None and bool((zeros != 0).any()):
            if columns is not None:
                raise ValueError("8-bit zero points with an order of columns")
            return self._decoded("int8 with zero points", values.float(), scales, zeros)
        if block_size(values.shape[1], values.shape[1] // scales.shape[1]) is None:
            return self._decoded("int8", values.float(), scales)
        return _with_columns(scaled_weight("int8", values, scales), columns)

    def _int4(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        values = _fields(stored, 4)[:, : self._num_columns(module)].to(torch.uint8)
        scales = _spread(self._part(module, "weight_scale"), values.shape, group.tile)
        return self._in_4_bits(values, scales, self._zeros(module, scales.shape, 4), self._group_of_columns(module))

    def _in_4_bits(
        self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor | None
    ) -> Weight:
        """values: uint8 in [0, 16); the others as for 8 bits."""
        values, columns = _sorted(values, groups)
        if block_size(values.shape[1], values.shape[1] // scales.shape[1]) is None:
            if columns is not None:
                raise ValueError(f"groups of {values.shape[1] // scales.shape[1]} columns with an order of columns")
            return self._decoded("int4", values.float() - 8, scales, zeros)
        unsigned = None if zeros is None else (zeros + 8).to(torch.uint8)
        return _with_columns(scaled_weight("int4", values, scales, unsigned), columns)

    def _nvfp4(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        self._tell("nvfp4 weights are decoded to bfloat16: no kernel here multiplies them as they are")
        scales = self._part(module, "weight_scale")
        if self._inner.has(f"{module}.weight_global_scale"):
            factor = 1.0 / float(self._part(module, "weight_global_scale"))
        else:
            factor = float(self._part(module, "weight_scale_2"))
        return fp4.decode_nvfp4(stored, scales, factor)

    def _mxfp4(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        self._tell("mxfp4 weights are decoded to bfloat16: no kernel here multiplies them as they are")
        return fp4.decode_mxfp4(stored, self._part(module, "weight_scale"))

    def _mxfp4_stack(self, name: str) -> torch.Tensor:
        """Experts as `transformers` has them: blocks uint8 [E, N, K / 32, 16] stand for a tensor [E, K, N]."""
        self._tell("mxfp4 weights are decoded to bfloat16: no kernel here multiplies them as they are")
        self._used.update((f"{name}_blocks", f"{name}_scales"))
        blocks, scales = self._inner.stored(f"{name}_blocks"), self._inner.stored(f"{name}_scales")
        return fp4.decode_mxfp4(blocks.flatten(-2), scales).transpose(1, 2)

    def _decoded(
        self, what: str, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> torch.Tensor:
        name = str(self._dtype).removeprefix("torch.")
        self._tell(
            f"{what} weights whose groups are no multiple of 32 inputs, or with zero points, are decoded to {name}"
        )
        grouped = values.unflatten(1, (scales.shape[1], -1))
        if zeros is not None:
            grouped = grouped - zeros.float().unsqueeze(2)
        return (grouped * scales.float().unsqueeze(2)).flatten(1).to(self._dtype)

    def _zeros(self, module: str, shape: torch.Size, bits: int) -> torch.Tensor | None:
        """Signed zero points [N, G] int32; None when there are none."""
        if not self._inner.has(f"{module}.weight_zero_point"):
            return None
        zeros = self._part(module, "weight_zero_point")
        if zeros.dtype == torch.int32:
            # Packed along the outputs.
            zeros = _fields(zeros.T, bits).T[: shape[0]] - (1 << (bits - 1))
        return zeros.int().reshape(shape)

    def _gptq(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        """Inputs before outputs, packed along the inputs; zero points along the outputs, less 1 in the first layout."""
        scales, packed = self._part(module, "scales").T, self._part(module, "qzeros")
        bits = 32 * packed.shape[1] // scales.shape[0]
        half = 1 << (bits - 1)
        values = _fields(stored.T.contiguous(), bits)
        offset = 1 if group.kind == "gptq" else 0
        signed = ((_fields(packed, bits) + offset) & (2 * half - 1)).T.contiguous() - half
        zeros = signed if bool((signed != 0).any()) else None
        groups = self._part(module, "g_idx") if self._inner.has(f"{module}.g_idx") else None
        scales = _spread(scales.contiguous(), values.shape, group.tile)
        if bits == 8:
            return self._in_8_bits((values - half).to(torch.int8), scales, zeros, groups)
        return self._in_4_bits(values.to(torch.uint8), scales, zeros, groups)

    def _awq(self, module: str, stored: torch.Tensor, group: QuantGroup) -> Weight:
        """Inputs before outputs, packed along the outputs, eight of them to a word in an order of their own."""
        values, zeros = (_awq_fields(words).T.contiguous() for words in (stored, self._part(module, "qzeros")))
        scales = _spread(self._part(module, "scales").T.contiguous(), values.shape, group.tile)
        return self._in_4_bits(values.to(torch.uint8), scales, zeros - 8, None)

    def _group_of_columns(self, module: str) -> torch.Tensor | None:
        has = self._inner.has(f"{module}.weight_g_idx")
        return self._part(module, "weight_g_idx") if has else None

    def _num_columns(self, module: str) -> int:
        return int(self._part(module, "weight_shape")[1])

    def _input_scale(self, module: str) -> float | None:
        name = f"{module}.input_scale"
        return float(self._inner.stored(name)) if self._inner.has(name) else None

    def _part(self, module: str, part: str) -> torch.Tensor:
        name = f"{module}.{part}"
        if not self._inner.has(name):
            raise ModelError(f"{self._inner.where(name)} is missing beside its weight; the download is incomplete")
        return self._inner.stored(name)

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.info(what)


_COUNTED = (".weight", ".weight_packed", ".qweight", ".bias", "_blocks")
_ONLINE = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_DENSE = (torch.float32, torch.float16, torch.bfloat16)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def is_projection(name: str, shape: Sequence[int]) -> bool:
    """What is quantized on loading: not embeddings, heads, or routers, which are small or sensitive."""
    return len(shape) == 2 and name.endswith(_ONLINE)


def _sorted(values: torch.Tensor, groups: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Columns by their group, and where each was; None when they lie so already."""
    # Negative groups are how compressed-tensors says that there is no order.
    if groups is None or bool((groups < 0).any()) or bool((groups[1:] >= groups[:-1]).all()):
        return values, None
    order = torch.argsort(groups, stable=True)
    return values.index_select(1, order), order


def _awq_fields(words: torch.Tensor) -> torch.Tensor:
    """int32 [M, N / 8] words to [M, N]: the fields of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest first."""
    fields = _fields(words, 4).unflatten(1, (-1, 8))
    return fields[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


def _with_columns(weight: PackedWeight, columns: torch.Tensor | None) -> PackedWeight:
    return weight if columns is None else replace(weight, columns=columns)


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [N, M] words to the fields of `bits` in them, the lowest first: int32 [N, M * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _spread(scales: torch.Tensor, shape: torch.Size, tile: tuple[int, int]) -> torch.Tensor:
    """Scales of a whole tensor, of rows, tiles or groups as one for each row and some columns: float32 [N, G]."""
    num_rows, num_columns = shape
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(num_rows, 1)
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if tile != (0, 0) and scales.shape == (-(-num_rows // tile[0]), -(-num_columns // tile[1])):
        scales = scales.repeat_interleave(tile[0], dim=0)[:num_rows]
        if num_columns % tile[1]:
            # The last tile is cut: its scale serves fewer columns, so all are told in steps that divide both.
            step = math.gcd(num_columns, tile[1])
            scales = scales.repeat_interleave(tile[1] // step, dim=1)[:, : num_columns // step]
    if scales.shape[0] != num_rows or num_columns % scales.shape[1]:
        raise ValueError(f"{list(scales.shape)} scales for a weight {list(shape)}")
    return scales
