# SPDX-License-Identifier: MIT
"""How a GPU's engine sleeps, on ranges of the host's memory: addresses stay, values come back or are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource
from tokenspeed.engine import kv_pool
from tokenspeed.engine.kv_pool import ReservedPool
from tokenspeed.engine.occupation import KV_CACHE, WEIGHTS, DeviceOccupation
from tokenspeed.engine.placed_weights import PlacedWeights
from tokenspeed.layers.cache import CacheTensor
from tokenspeed.models import load_model, overwrite, parts_of
from tokenspeed.models.testing import MODELS, SMALL, logits
from tokenspeed.weights import dummy_reader

CPU = torch.device("cpu")


class HostRange:
    """A `ReservedMemory` of the host's memory: what is not backed holds garbage, what is newly backed zeros."""

    room = 1 << 40

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.from_numpy(np.full(num_bytes, 0xA7, np.uint8))
        self.mapped = 0

    def grow(self, num_bytes: int) -> None:
        assert num_bytes <= len(self._memory)
        if num_bytes > self.room:
            raise RuntimeError("cuMemCreate failed: out of memory (2)")
        self._memory[self.mapped : num_bytes] = 0
        self.mapped = max(self.mapped, num_bytes)

    def release(self) -> None:
        self._memory[:] = 0xA7
        self.mapped = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert num_bytes <= self.mapped
        return self._memory[:num_bytes].view(dtype).view(shape)


def load(folder: Path, name: str, staged: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | MODELS[name]))
    source = ModelSource("folder", folder, "test")
    return load_model(source, load_model_config(source), "cpu", torch.float32, "dummy", staged=staged)


def addresses(model: Any) -> list[int]:
    return [part.data_ptr() for _, part in parts_of(model) if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("name", ["dense", "tied", "sinks", "latent"])
def test_placed_weights_compute_the_same_before_and_after_a_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected, model = logits(load(tmp_path, name)), load(tmp_path, name)
    placed = PlacedWeights(model, CPU, HostRange)
    places = addresses(model)
    assert torch.equal(logits(model), expected)
    start, end = min(places), min(places) + placed.num_bytes
    assert all(start <= place < end for place in places), "everything has moved"
    for _ in range(2):
        placed.release(keep=True)
        placed.release(keep=True)
        placed.resume()
        placed.resume()
        assert addresses(model) == places and torch.equal(logits(model), expected)
    # Level 2: nothing is kept, and what is loaded beside it is copied in.
    placed.release(keep=False)
    placed.resume()
    assert not torch.equal(logits(model), expected)
    overwrite(model, load(tmp_path, name, staged=True))
    assert addresses(model) == places and torch.equal(logits(model), expected)
    monkeypatch.setattr(dummy_reader, "_STANDARD_DEVIATION", 0.1)
    overwrite(model, load(tmp_path, name, staged=True))
    placed.release(keep=True)
    placed.resume()
    assert torch.equal(logits(model), logits(load(tmp_path, name)))


def test_tensors_that_share_memory_go_on_sharing_it_and_odd_dtypes_move_too() -> None:
    whole = torch.arange(24.0).view(4, 6)
    turned, tail = whole.T, whole[2:, 1:]
    small = torch.tensor([1.5, -2.0], dtype=torch.float8_e4m3fn)
    words, alone = torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor(3.5, dtype=torch.bfloat16)
    copies = [part.clone() for part in (whole, turned, tail, small.float(), words, alone)]
    placed = PlacedWeights({"a": [whole, turned], "b": (tail, small), "c": words, "d": alone}, CPU, HostRange)
    assert placed.num_bytes == 4 * 256
    assert all(torch.equal(*pair) for pair in zip((whole, turned, tail, small.float(), words, alone), copies))
    assert turned.data_ptr() == whole.data_ptr() and turned.stride() == (1, 6) and tail.storage_offset() % 6 == 1
    whole[3, 5] = -1.0
    assert tail[1, 4] == -1.0 == turned[5, 3]


def test_what_was_kept_is_not_lost_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(1000.0)
    placed = PlacedWeights([weight], CPU, HostRange)
    placed.release(keep=True)
    monkeypatch.setattr(HostRange, "room", 100)
    with pytest.raises(RuntimeError, match="out of memory"):
        placed.resume()
    placed.release(keep=True)  # as all ranks do when one has no room
    monkeypatch.setattr(HostRange, "room", 1 << 40)
    placed.resume()
    assert torch.equal(weight, torch.arange(1000.0))


def test_kv_blocks_come_back_zeroed_under_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "ReservedMemory", HostRange)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    layers = [(CacheTensor((2, 4), torch.float32), CacheTensor((2,), torch.int32))] * 3
    pool = ReservedPool(layers, 10, CPU)
    caches = pool.grow(8)
    weight = torch.ones(5)
    occupation = DeviceOccupation(pool, 8, PlacedWeights([weight], CPU, HostRange))
    for layer in caches:
        layer[0][:] = 3.0
    assert occupation.release(KV_CACHE, keep=True) is False
    assert caches[0][0].view(torch.uint8).eq(0xA7).all() and torch.equal(weight, torch.ones(5))
    monkeypatch.setattr(HostRange, "room", 100)  # enough for the small tensors alone
    with pytest.raises(RuntimeError, match="out of memory"):
        occupation.resume(KV_CACHE)
    occupation.release(KV_CACHE, keep=False)
    monkeypatch.setattr(HostRange, "room", 1 << 40)
    occupation.resume(KV_CACHE)
    assert all(not tensor.any() for layer in caches for tensor in layer)
    assert occupation.release(WEIGHTS, keep=True) is True
    occupation.resume(WEIGHTS)
    assert torch.equal(weight, torch.ones(5))
