# SPDX-License-Identifier: MIT
"""Finding the modules that register solutions: the family folders of this package, then plugins.

A module's prefix says what it needs before it may be imported: `reference`, `composed` and `vendor_*` nothing,
`cpu_*` the compiled `_cpu` extension, `triton_*` Triton and a GPU, `cuda_*` a GPU. `load(everything=True)` also imports
what this machine cannot run, so that `explain` can say why it lost. Plugins are entry points of group
`tokenspeed_kernel.plugins`: a module whose import registers solutions, or a callable that does so when called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import pkgutil
from pathlib import Path

from tokenspeed_kernel.registry.errors import KernelError
from tokenspeed_kernel.registry.platform import current_platform

PLUGIN_GROUP = "tokenspeed_kernel.plugins"
FAMILIES = ("attention", "gemm", "norm", "activation", "rope", "sampling", "kvcache", "quant", "moe", "step")

_PACKAGE = "tokenspeed_kernel"
_PREFIXES = ("reference", "composed", "vendor_", "cpu_", "triton_", "cuda_")
_log = logging.getLogger(__name__)
_loaded_levels: set[bool] = set()
_unavailable: dict[str, str] = {}


def load(everything: bool = False) -> None:
    """Import what this machine can use, or `everything` importable; done once each. KernelError names what fails."""
    if everything in _loaded_levels or True in _loaded_levels:
        return
    first = not _loaded_levels
    _loaded_levels.add(everything)
    for module in _family_modules():
        _load_module(module, everything)
    if first:
        load_plugins()


def unavailable(op: str) -> list[tuple[str, str]]:
    """(module, reason) of the modules in the op's family that could not be imported here."""
    family = f".{op.partition('.')[0]}."
    return [(module.rpartition(".")[2], why) for module, why in _unavailable.items() if family in module]


def _family_modules() -> list[str]:
    root = Path(__file__).parent.parent
    return [
        f"{_PACKAGE}.{family}.{info.name}"
        for family in FAMILIES
        for info in sorted(pkgutil.iter_modules([str(root / family)]), key=lambda info: info.name)
        if info.name.startswith(_PREFIXES) and not info.name.endswith("_test")
    ]


def _load_module(module: str, everything: bool) -> None:
    leaf = module.rpartition(".")[2]
    if reason := _missing(leaf):
        _unavailable[module] = reason
        return
    on_gpu = leaf.startswith(("triton_", "cuda_"))
    if on_gpu and not everything and current_platform().cuda_capability is None:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise KernelError(f"{module} does not import ({error}); rebuild with tools/build_native.sh") from error


def _missing(leaf: str) -> str | None:
    if leaf.startswith("cpu_") and importlib.util.find_spec(f"{_PACKAGE}._cpu") is None:
        if current_platform().cuda_capability is None:
            _warn_once_no_cpu()
        return "the compiled module tokenspeed_kernel._cpu is absent; build it with tools/build_native.sh cpu"
    if leaf.startswith("triton_") and importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    return None


_warned: set[str] = set()


def _warn_once_no_cpu() -> None:
    if "cpu" not in _warned:
        _warned.add("cpu")
        _log.warning("tokenspeed_kernel._cpu is not built: CPU tensors use the slow reference solutions")


def load_plugins() -> None:
    """Import every plugin once more and call those that are callables; KernelError names one that fails."""
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            plugin = entry.load()
        except (ImportError, AttributeError) as error:
            raise KernelError(
                f"kernel plugin {entry.name!r} ({entry.value}) does not import: {error}; fix or uninstall it"
            ) from error
        if callable(plugin):
            plugin()
