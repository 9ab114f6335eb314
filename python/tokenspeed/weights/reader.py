# SPDX-License-Identifier: MIT
"""What every load format provides: tensors by their checkpoint name, on the CPU, as they lie in the file.

Names are those of `transformers` ("model.layers.0.self_attn.q_proj.weight"), whatever the file calls them. A reader
maps files and copies nothing that it need not; one thread uses it, while a model is built, and drops it after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch

from tokenspeed.config.model_error import ModelError
from tokenspeed_kernel.api import Weight


class WeightReader(ABC):
    """One model's tensors. Remembers which were read, so that leftovers are noticed."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    @property
    @abstractmethod
    def num_tensors(self) -> int:
        """How many reads to expect, for a progress bar; 0 when not known."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file that holds (or should hold) the tensor and what it is called there, for messages."""

    @abstractmethod
    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The tensor that `has` has confirmed; `shape` is what the model wants."""

    @abstractmethod
    def _names(self) -> set[str]:
        """All names, for the check of leftovers."""

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A dense tensor or a PackedWeight in layout "blocks", of this logical shape; out of a file it is on the CPU.

        Raises ModelError when it is missing or has another shape.
        """
        self._require(name)
        weight = self._fetch(name, shape)
        self._require_shape(name, tuple(weight.shape), shape)
        self._used.add(name)
        return weight

    def read_stack(self, name: str, shape: tuple[int, int, int]) -> list[Weight]:
        """The E matrices [N, K] of a tensor [E, N, K], each as `read` gives one. Raises ModelError as it does."""
        whole = self.read(name, shape)
        assert isinstance(whole, torch.Tensor)  # packed weights are matrices
        return list(whole.unbind(0))

    def files(self) -> list[Path]:
        """The files that the tensors are read from, in about the order in which a model asks for them."""
        return []

    def replaced(self, names: Iterable[str]) -> None:
        """Tensors of these names come from elsewhere: nobody reads them here."""
        self._used.update(names)

    def scalar(self, name: str) -> float | None:
        """The value of a tensor with one element; None when there is none of this name."""
        return None

    def _require(self, name: str) -> None:
        if not self.has(name):
            raise ModelError(f"{self.where(name)} is missing; the download is incomplete or not this architecture")

    def _require_shape(self, name: str, have: tuple[int, ...], want: tuple[int, ...]) -> None:
        if have != want:
            raise ModelError(
                f"{self.where(name)} has shape {list(have)}, the model's configuration asks for {list(want)}; "
                "configuration and weights do not belong together"
            )

    def check_all_used(self, endings: tuple[str, ...], beginnings: tuple[str, ...]) -> None:
        """Raise ModelError for a tensor that nothing read, unless its name ends or begins with one of these."""
        for name in sorted(self._names() - self._used):
            if not name.endswith(endings) and not name.startswith(beginnings):
                raise ModelError(f"{self.where(name)} has no place in this architecture; its tokens would be wrong")
