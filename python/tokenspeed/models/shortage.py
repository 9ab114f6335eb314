# SPDX-License-Identifier: MIT
"""What to say when weights do not fit: how much they need, how much there was, what to change. Called by `loading`."""

from __future__ import annotations

import re

import torch

from tokenspeed.config.model_source import ModelSource

_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")


class Shortage:
    """Made before the weights are loaded, asked when they did not fit."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._free_bytes, self._total_bytes = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)

    def message(self, error: RuntimeError, from_files: bool) -> str:
        """One line for the allocation that failed. from_files: whether the source's files hold the weights."""
        needed, about = (file_bytes(self._source) if from_files else 0), "about"
        if not needed:
            needed, about = self._loaded_bytes() + asked_bytes(error), "more than"
        text = f"{self._source.path}: the weights do not fit in the memory of {self._device}: "
        text += f"they need {about} {needed / 2**30:.1f} GiB"
        if self._device.type != "cuda":
            return f"{text}; use a smaller model"
        free, total = self._free_bytes / 2**30, self._total_bytes / 2**30
        return (
            f"{text}, and {free:.1f} of its {total:.1f} GiB were free; stop what else uses it, or use "
            "--quantization fp8, --tensor-parallel-size or a smaller model"
        )

    def _loaded_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        return max(0, self._free_bytes - torch.cuda.mem_get_info(self._device)[0])


def asked_bytes(error: RuntimeError) -> int:
    """What an allocator says that it was asked for; 0 when it does not say."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0


def file_bytes(source: ModelSource) -> int:
    """Of the weights on the disk."""
    files = [source.path] if source.kind == "gguf" else list(source.path.iterdir())
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHT_FILES)
