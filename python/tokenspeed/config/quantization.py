# SPDX-License-Identifier: MIT
"""How a checkpoint's weights are quantized: config.json's `quantization_config` as data.

Read once at start-up, before any weight. A method, bit width or layout that no reader has is refused here, by name.
Which tensors are quantized is seen in the files themselves; this says what their bytes mean. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.config.json_keys import OBJECT, OBJECTS, SIZE, TEXT, TEXTS, TILE, Rule, check_all
from tokenspeed.config.model_error import ModelError

WeightKind = Literal["fp8", "int8", "int4", "nvfp4", "mxfp4", "gptq", "gptq_v2", "awq"]
"""gptq, gptq_v2 and awq are layouts of int4 and int8; the parts themselves say how many bits."""

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq")
"""Values of `quant_method` that are read; GGUF files bring their own."""


@dataclass(frozen=True)
class QuantGroup:
    """The layers that are stored alike.

    targets: names of modules, "re:..." for a pattern, or "Linear" for all.
    tile: rows and columns that share a scale, where the shape of the scales does not say it; (0, 0) otherwise.
    rounds_inputs: whether the checkpoint was made for products of fp8 with fp8.
    """

    targets: tuple[str, ...]
    kind: WeightKind
    tile: tuple[int, int]
    rounds_inputs: bool


@dataclass(frozen=True)
class Quantization:
    """method: as the checkpoint or the flag calls it. online: weights are stored dense and quantized while loading."""

    method: str
    groups: tuple[QuantGroup, ...]
    ignored: tuple[str, ...]
    online: bool

    def group_of(self, module: str) -> QuantGroup | None:
        """How the module's weight is stored; None when it is not quantized."""
        if any(_matches(pattern, module) for pattern in self.ignored):
            return None
        return next((group for group in self.groups if any(_matches(t, module) for t in group.targets)), None)


GGUF_TYPES = Quantization("gguf", (), (), online=False)
"""Of a GGUF file, where every tensor names its own type."""


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("quant_method", "activation_scheme", "quant_algo"), TEXT),
    **dict.fromkeys(("checkpoint_format", "format", "version"), TEXT),
    **dict.fromkeys(("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"), TEXTS),
    "weight_block_size": TILE,
    "config_groups": OBJECTS,
    "sparsity_config": OBJECT,
}
_GROUP_RULES = {"targets": TEXTS, "format": TEXT, "weights": OBJECT, "input_activations": OBJECT}
_WEIGHT_RULES = {"num_bits": SIZE, "type": TEXT, "block_structure": TILE}


def quantization_from_json(values: Mapping[str, Any], where: str) -> Quantization | None:
    """`values`: a whole config.json. Raises ModelError for what is not supported."""
    config = values.get("quantization_config") or values.get("compression_config")
    if config is None:
        return None
    check_all(config, _RULES, f"{where}: quantization_config")
    method = config.get("quant_method", "unnamed")
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "mxfp4": _mxfp4,
        "gptq": _gptq,
        "awq": _awq,
    }
    if method not in readers:
        raise ModelError(
            f"{where}: quantization {method!r} is not supported ({', '.join(METHODS)}); "
            "use a GGUF file or another variant of the model"
        )
    ignored = _names(config, "ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
    return Quantization(method, readers[method](config, where), ignored, online=False)


# Files beside a config.json that says nothing, and what their content is as a quantization_config.
QUANTIZATION_BESIDE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": lambda values: {"quant_method": "modelopt", **(values.get("quantization") or {})},
    "quantize_config.json": lambda values: {"quant_method": "gptq", **values},
    "quant_config.json": lambda values: {"quant_method": "awq", **values},
}


def _fp8(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    rows, columns = config.get("weight_block_size") or (0, 0)
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise ModelError(f"{where}: fp8 activation_scheme {scheme!r} is not supported (dynamic, static)")
    return (QuantGroup(("Linear",), "fp8", (rows, columns), rounds_inputs=True),)


def _modelopt(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    algorithm = config.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise ModelError(f"{where}: modelopt quant_algo {algorithm!r} is not supported (FP8, NVFP4)")
    kind: WeightKind = "fp8" if algorithm == "FP8" else "nvfp4"
    return (QuantGroup(("Linear",), kind, (0, 0), rounds_inputs=kind == "fp8"),)


def _mxfp4(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    return (QuantGroup(("Linear",), "mxfp4", (0, 0), rounds_inputs=False),)


def _gptq(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    layout = config.get("checkpoint_format") or ("marlin" if config.get("is_marlin_format") else "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"{where}: gptq checkpoint_format {layout!r} is not supported (gptq, gptq_v2)")
    _require_bits(config, "gptq", (4, 8), where)
    kind: WeightKind = "gptq" if layout == "gptq" else "gptq_v2"
    return (QuantGroup(("Linear",), kind, (0, 0), rounds_inputs=False),)


def _awq(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(f"{where}: awq version {version!r} is not supported (gemm)")
    _require_bits(config, "awq", (4,), where)
    return (QuantGroup(("Linear",), "awq", (0, 0), rounds_inputs=False),)


def _require_bits(config: Mapping[str, Any], method: str, supported: tuple[int, ...], where: str) -> None:
    bits = config.get("bits", config.get("w_bit"))
    if bits not in supported:
        known = " and ".join(map(str, supported))
        raise ModelError(f"{where}: {bits}-bit {method} weights are not supported ({known})")


def _compressed(config: Mapping[str, Any], where: str) -> tuple[QuantGroup, ...]:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(f"{where}: compressed-tensors sparsity {sparsity!r} is not supported; use a dense variant")
    groups = (config.get("config_groups") or {}).values()
    for group in groups:
        check_all(group, _GROUP_RULES, f"{where}: config_groups")
        check_all(group.get("weights") or {}, _WEIGHT_RULES, f"{where}: config_groups' weights")
    if not groups:
        raise ModelError(f"{where}: compressed-tensors without 'config_groups' says nothing about its weights")
    return tuple(_compressed_group(group, config.get("format", "dense"), where) for group in groups)


def _compressed_group(group: Mapping[str, Any], default: str, where: str) -> QuantGroup:
    weights = group.get("weights") or {}
    layout = group.get("format") or default
    kind = _COMPRESSED.get((layout, weights.get("type"), weights.get("num_bits")))
    if kind is None:
        raise ModelError(
            f"{where}: compressed-tensors format {layout!r} with {weights.get('num_bits')}-bit {weights.get('type')} "
            "weights is not supported (4- and 8-bit int, 8-bit float, nvfp4, mxfp4)"
        )
    inputs = group.get("input_activations") or {}
    rounds = kind == "fp8" and inputs.get("num_bits") == 8 and inputs.get("type") == "float"
    rows, columns = weights.get("block_structure") or (0, 0)
    return QuantGroup(tuple(group.get("targets") or ("Linear",)), kind, (rows, columns), rounds)


_COMPRESSED: dict[tuple[str, Any, Any], WeightKind] = {
    ("pack-quantized", "int", 4): "int4",
    ("pack-quantized", "int", 8): "int8",
    ("int-quantized", "int", 8): "int8",
    ("naive-quantized", "int", 8): "int8",
    ("naive-quantized", "float", 8): "fp8",
    ("float-quantized", "float", 8): "fp8",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4",
    ("mxfp4-pack-quantized", "float", 4): "mxfp4",
}


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(name for key in keys for name in config.get(key) or ())


def _matches(pattern: str, module: str) -> bool:
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    # A name stands for everything below it too.
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)
