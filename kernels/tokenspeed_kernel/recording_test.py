# SPDX-License-Identifier: MIT
"""A recording does again what its function did, and what would be missing from a play forbids it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tokenspeed_kernel import api
from tokenspeed_kernel.recording import Recorded, Workspace, record

Step = Callable[[torch.Tensor], torch.Tensor]


def weight(rows: int, columns: int) -> api.Weight:
    generator = torch.Generator().manual_seed(rows)
    return api.prepare_weight(torch.randn(rows, columns, generator=generator), "cpu")


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape) + (x + x)


def placed(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3, 16)
    out[:, 1:, 8:] = x.view(4, 2, 8)
    return api.silu_and_mul(out.view(4, 48))


TALL, NORM, SOME = weight(48, 16), torch.linspace(0.5, 1.5, 16), torch.tensor([1, 0])
STEPS: dict[str, Step] = {
    "a product": lambda x: api.linear(x, TALL),
    "a sum into zeros": lambda x: api.add_rms_norm(x, torch.zeros_like(x), NORM, 1e-5)[1].view(2, 32),
    "sums": doubled,
    "heads of a projection": lambda x: api.rms_norm(api.linear(x, TALL).view(-1, 3, 16)[:, 1:], NORM, 1e-5).flatten(1),
    "copies": lambda x: torch.cat([x[:, 8:], x, torch.cat([x, x])[2:6]], dim=1),
    "a part written": lambda x: api.linear(x, TALL).view(4, 3, 16)[:, :, 4:].contiguous().flatten(1),
    "a copy into a part": placed,
    "a shape that takes a copy": lambda x: api.silu_and_mul(x[:, :8].reshape(2, 16)),
    "nothing beside": lambda x: api.linear(torch.cat([torch.empty(0), x, torch.cat([x[:0], x[:0]]) + x[:0]]), TALL),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", STEPS)
def test_a_play_gives_the_bits_of_a_call_on_what_the_input_holds_then(name: str) -> None:
    x, step = torch.randn(4, 16), STEPS[name]
    result, recorded = record(lambda: step(x), Workspace())
    assert isinstance(recorded, Recorded) and len(recorded) > 0
    assert torch.equal(result, step(x))
    for _ in range(3):
        x.copy_(torch.randn(4, 16))
        assert torch.equal(recorded.play(), step(x))


FORBIDDEN: dict[str, tuple[Step, str]] = {
    "arithmetic": (lambda x: x * 2, "aten.mul.Tensor"),
    "in place": (lambda x: x.add_(1), "aten.add_.Tensor"),
    "zeros in place": (lambda x: torch.zeros(4, 16, out=torch.empty(4, 16)), "aten.zeros.out"),
    "a cat in place": (lambda x: torch.cat([x, x], out=torch.empty(8, 16)), "aten.cat.out"),
    "a sign to come": (
        lambda x: torch._neg_view(x).flatten().clone(),
        "a copy of torch.float32 (1,) to torch.float32 (1,)",
    ),
    "a sum of other shapes": (lambda x: x + x[:1], "aten.add.Tensor"),
    "a product of torch's": (lambda x: x @ x.T, "aten.mm.default"),
    "another dtype": (lambda x: x.to(torch.bfloat16), "aten._to_copy.default"),
    "columns": (lambda x: x.t().contiguous(), "a copy of torch.float32 (1, 16) to torch.float32 (4, 1)"),
    "chance": (lambda x: torch.rand(4), "aten.rand.default"),
    "a number": (lambda x: x if float(x[0, 0]) < 100 else x[:1], "aten._local_scalar_dense.default"),
    "a choice of rows": (lambda x: x[SOME], "aten.index.Tensor"),
    "a list": (lambda x: x if x.tolist() else x[:1], "torch.Tensor.tolist"),
    "numpy": (lambda x: x if x.numpy().size else x[:1], "torch.Tensor.numpy"),
    "an array of numpy's": (lambda x: x if np.asarray(x).size else x[:1], "torch.Tensor.__array__"),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_no_kernel_forbids_a_recording_and_is_computed_all_the_same(name: str) -> None:
    step, what = FORBIDDEN[name]
    x = torch.randn(4, 16)
    expected = step(x.clone())
    result, told = record(lambda: step(x), Workspace())
    assert told == what
    assert name == "chance" or torch.equal(result, expected)


@torch.inference_mode()
def test_memory_that_is_given_back_is_used_again_but_never_a_result() -> None:
    """Ten layers hold the memory of one, and a second recording takes it too."""
    workspace, x, narrow = Workspace(), torch.randn(4, 16), weight(16, 48)
    seen: set[int] = set()

    def layers() -> torch.Tensor:
        hidden = x
        for _ in range(10):
            wide = api.linear(hidden, TALL)
            hidden = api.linear(wide, narrow)
            seen.update((wide.data_ptr(), hidden.data_ptr()))
        return hidden

    expected = layers()
    seen.clear()
    first, second = record(layers, workspace)[1], record(layers, workspace)[1]
    assert isinstance(first, Recorded) and isinstance(second, Recorded)
    assert len(seen) <= 5 and first.result.data_ptr() != second.result.data_ptr()
    del layers
    gc.collect()
    others = [torch.full((4, 48), float("nan")) for _ in range(50)]
    assert torch.equal(first.play(), expected) and torch.equal(second.play(), expected)
    assert torch.equal(first.result, expected) and all(bool(other.isnan().all()) for other in others)


CONSTANTS: dict[str, Step] = {
    "a kernel": lambda x: api.linear(x, TALL, torch.frombuffer(bytearray(b"@" * 192), dtype=torch.float32)),
    "a copy": lambda x: torch.cat([x, torch.frombuffer(bytearray(b"@" * 256), dtype=torch.float32).view(4, 16)]),
    "a sum": lambda x: x + torch.frombuffer(bytearray(b"@" * 256), dtype=torch.float32).view(4, 16),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_the_function_makes_lives_as_long_as_the_recording(name: str) -> None:
    """torch allocates none of it; the memory would be somebody else's when it is read again."""
    x, step = torch.randn(4, 16), CONSTANTS[name]
    expected, recorded = record(lambda: step(x), Workspace())
    assert isinstance(recorded, Recorded)
    expected = expected.clone()
    others = [bytearray(b"\xff" * size) for size in (192, 256) for _ in range(500)]
    assert torch.equal(recorded.play(), expected) and all(set(other) == {255} for other in others)


@torch.inference_mode()
def test_numbers_out_of_range_are_refused_in_a_play_too() -> None:
    ids = torch.tensor([1, 2])
    _, recorded = record(lambda: api.embedding(ids, TALL, torch.float32), Workspace())
    assert isinstance(recorded, Recorded)
    ids[1] = 48
    with pytest.raises(ValueError, match=r"token_ids\[1\] is 48"):
        recorded.play()
    ids[1] = 47
    assert torch.equal(recorded.play(), api.embedding(ids, TALL, torch.float32))


@torch.inference_mode()
def test_a_function_that_raises_leaves_no_recording_in_progress() -> None:
    def fails() -> torch.Tensor:
        raise KeyError("nothing")

    with pytest.raises(KeyError):
        record(fails, Workspace())
    x = torch.randn(4, 16)
    result, recorded = record(lambda: api.linear(x, TALL), Workspace())
    assert isinstance(recorded, Recorded) and len(recorded) == 1
    api.linear(x, TALL)
    assert len(recorded) == 1 and torch.equal(result, recorded.play())
