# SPDX-License-Identifier: MIT
"""What layers are built from: a place in the checkpoint's tree of names, with the device and the ranks to serve.

A layer asks for its weights by the last part of their names and gets them sharded, stacked and prepared for its
device. A model whose construction raises was never handed out, so nothing is ever half-loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import torch

from tokenspeed.config.heads import Share, fair_share
from tokenspeed.config.model_error import ModelError
from tokenspeed.parallel import Group
from tokenspeed.weights.kv_format import KVFormat
from tokenspeed.weights.progress import Progress
from tokenspeed.weights.reader import WeightReader
from tokenspeed.weights.shard import check_even, own_columns, own_rows, stack
from tokenspeed_kernel import api
from tokenspeed_kernel.api import ExpertMatrix, PackedWeight, Weight

Prepared = TypeVar("Prepared", torch.Tensor, PackedWeight, ExpertMatrix, Weight)


class Split(Enum):
    """Which axis of a matrix is divided among the ranks."""

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True)
class Weights:
    """dtype: of the activations on `device`. kv: how layers keep keys and values. `prefix` ends with a dot, or is empty
    at the root. staged: what is prepared for the device waits on the CPU, for a device that has no room for it yet."""

    reader: WeightReader
    device: torch.device
    dtype: torch.dtype
    group: Group
    progress: Progress
    kv: KVFormat
    prefix: str = ""
    staged: bool = False

    def at(self, path: str) -> Weights:
        """The subtree `path`."""
        return replace(self, prefix=f"{self.prefix}{path}.")

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.reader.has(self.prefix + name)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """What keys and values of the attention at this place are divided by in an fp8 cache."""
        return self.kv.scales(layer, lambda name: self.reader.scalar(self.prefix + name))

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A dense [size] in the activations' dtype, on every rank whole. Raises ModelError."""
        return self.on_device(self.whole(name, (size,)))

    def matrix(self, name: str, shape: tuple[int, int], split: Split, share: Share | None = None) -> Weight:
        """A prepared [N, K], or our part of it: an even one unless `share` says which. Raises ModelError."""
        prepared = api.prepare_weight(self._read_matrix(name, shape, split, share), self.device, self.dtype)
        self.progress.advance()
        return self.kept(prepared)

    def dense(self, name: str, shape: tuple[int, int], split: Split) -> torch.Tensor:
        """The values of a matrix, or of our part, on the CPU: for weights that are taken apart. Raises ModelError."""
        weight = self._read_matrix(name, shape, split)
        self.progress.advance()
        if not isinstance(weight, PackedWeight):
            return weight
        values = api.dequantize(weight)
        return values if weight.columns is None else torch.empty_like(values).index_copy_(1, weight.columns, values)

    def prepare(self, matrix: torch.Tensor) -> Weight:
        """A dense [N, K] on the CPU as a product wants it on our device."""
        return self.kept(api.prepare_weight(matrix.contiguous(), self.device, self.dtype))

    def stacked(
        self, names: Sequence[str], sizes: Sequence[int], num_inputs: int, shares: Sequence[Share] | None = None
    ) -> list[Weight]:
        """Matrices [size, num_inputs] on top of each other, each split by outputs: one prepared weight.

        shares: our part of each, where they are not split evenly.

        Several only when the file packs them in different formats and the device keeps them packed.
        """
        parts = [
            self._read_matrix(name, (size, num_inputs), Split.OUTPUTS, share)
            for name, size, share in zip(names, sizes, shares or itertools.repeat(None))
        ]
        prepared = [self.kept(api.prepare_weight(part, self.device, self.dtype)) for part in stack(parts)]
        for _ in names:
            self.progress.advance()
        dense = [part for part in prepared if isinstance(part, torch.Tensor)]
        return stack([*dense]) if len(dense) == len(prepared) else prepared

    def stacked_bias(
        self, names: Sequence[str], sizes: Sequence[int], shares: Sequence[Share] | None = None
    ) -> torch.Tensor:
        """Biases end to end, each split among the ranks as `stacked` has it."""
        parts = [
            own_part(self.whole(name, (size,)), self.group, share)
            for name, size, share in zip(names, sizes, shares or itertools.repeat(None))
        ]
        return self.on_device(torch.cat(parts))

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole tensor as the file has it. Raises ModelError."""
        weight = self.reader.read(self.prefix + name, shape)
        if isinstance(weight, PackedWeight):
            raise ModelError(f"{self.reader.where(self.prefix + name)} is packed ({weight.format}), expected dense")
        self.progress.advance()
        return weight

    def on_device(self, vector: torch.Tensor) -> torch.Tensor:
        """A copy in the activations' dtype."""
        # A copy: the file's pages must not stay mapped for a few numbers.
        return vector.to(device="cpu" if self.staged else self.device, dtype=self.dtype, copy=True)

    def kept(self, prepared: Prepared) -> Prepared:
        """A weight where this load leaves it; its tensors are a dataclass's fields, or itself."""
        if not self.staged:
            return prepared
        if isinstance(prepared, torch.Tensor):
            return prepared.to("cpu")
        fields = {field.name: getattr(prepared, field.name) for field in dataclasses.fields(prepared)}
        moved: dict[str, Any] = {
            name: part.to("cpu") for name, part in fields.items() if isinstance(part, torch.Tensor)
        }
        return replace(prepared, **moved)

    def _read_matrix(self, name: str, shape: tuple[int, int], split: Split, share: Share | None = None) -> Weight:
        full_name = self.prefix + name
        if split is not Split.NONE and share is None and self.device.type != "cpu":
            check_even(shape[0 if split is Split.OUTPUTS else 1], self.group, self.reader.where(full_name))
        weight = self.reader.read(full_name, shape)
        if split is Split.OUTPUTS:
            return own_rows(weight, self.group, self.reader.where(full_name), share)
        if split is Split.INPUTS:
            return own_columns(weight, self.group, self.reader.where(full_name), share)
        return weight


def own_part(vector: torch.Tensor, group: Group, share: Share | None) -> torch.Tensor:
    """Our share of a vector that goes with outputs split among the ranks."""
    if share is None or group.size == 1:
        share = fair_share(vector.shape[0], group.rank, group.size)
    return vector[share.start : share.start + share.count]
