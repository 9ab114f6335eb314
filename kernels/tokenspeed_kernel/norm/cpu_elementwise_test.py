# SPDX-License-Identifier: MIT
"""CPU norms, activation, rotary embedding and cache writes at every instruction set: edges, invariance, bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tokenspeed_kernel import _cpu, api
from tokenspeed_kernel.numerics.cpu_isa import at_level, isa_levels, with_threads
from tokenspeed_kernel.rope import reference as rope_reference


@pytest.fixture(params=isa_levels(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param) as level:
        yield level


@pytest.mark.parametrize("hidden", [1, 15, 16, 17, 576])
def test_norm_of_any_width_agrees_with_torch(hidden: int) -> None:
    x, weight = torch.randn(3, hidden), torch.randn(hidden)
    assert torch.allclose(api.rms_norm(x, weight, 1e-5), F.rms_norm(x, (hidden,), weight, 1e-5), atol=1e-5)


def test_norm_over_heads_keeps_the_shape() -> None:
    x, weight = torch.randn(4, 3, 64), torch.ones(64)
    assert torch.allclose(api.rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5), atol=1e-5)


def test_tokens_of_elementwise_kernels_have_the_same_bits_in_any_batch() -> None:
    x, weight = torch.randn(200, 576), torch.randn(576)
    with with_threads(3):
        norm, silu = api.rms_norm(x, weight, 1e-5), api.silu_and_mul(x)
        added, total = api.add_rms_norm(x, x.flip(0).contiguous(), weight, 1e-5)
    for i in (0, 77, 199):
        one = x[i : i + 1]
        assert torch.equal(api.rms_norm(one, weight, 1e-5)[0], norm[i])
        assert torch.equal(api.silu_and_mul(one)[0], silu[i])
        alone, alone_total = api.add_rms_norm(one, x[199 - i : 200 - i].clone(), weight, 1e-5)
        assert torch.equal(alone[0], added[i]) and torch.equal(alone_total[0], total[i])


def test_silu_is_right_where_exponentials_leave_the_range() -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, 1e30]])
    got = api.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.allclose(got, F.silu(gate), rtol=1e-6, atol=1e-37)


def test_not_a_number_stays_visible() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = float("nan")
    assert api.silu_and_mul(x)[0, 3].isnan()
    assert api.rms_norm(x, torch.ones(32), 1e-5).isnan().all()


@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (64, 16), (10, 6), (128, 128)])
def test_rope_turns_views_of_a_fused_projection_in_place(head_dim: int, rot_dim: int) -> None:
    fused = torch.randn(5, 7, head_dim)
    want = fused.clone()
    positions, table = torch.tensor([0, 9, 3, 3, 1]), torch.randn(10, rot_dim)
    rope_reference.rope(want[:, :4], want[:, 4:6], positions, table)
    api.rope(fused[:, :4], fused[:, 4:6], positions, table)
    assert torch.allclose(fused, want, atol=1e-6)


def test_position_past_the_table_is_named() -> None:
    heads = torch.randn(2, 1, 16)
    with pytest.raises(ValueError, match=r"positions\[1\] is 10, must be in \[0, 10\)"):
        api.rope(heads, heads.clone(), torch.tensor([0, 10]), torch.randn(10, 16))


def test_slot_outside_the_cache_is_named_and_nothing_is_written() -> None:
    cache = torch.zeros(3, 1, 4, 16)
    tokens = torch.ones(2, 1, 16)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 12"):
        api.store_kv(tokens, tokens, cache, cache.clone(), torch.tensor([0, 12]))
    assert not cache.any()


def test_block_copies_move_whole_blocks_of_every_cache_and_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        caches = [torch.randn(6, 2, 4, 16).to(dtype) for _ in range(3)]
        before = [cache.clone() for cache in caches]
        api.copy_blocks(caches, torch.tensor([[1, 4], [2, 5]], dtype=torch.int32))
        for cache, old in zip(caches, before, strict=True):
            assert torch.equal(cache[[4, 5]], old[[1, 2]]) and torch.equal(cache[:4], old[:4])


def test_block_outside_the_cache_is_named() -> None:
    with pytest.raises(ValueError, match=r"pairs\[1\] is 6"):
        api.copy_blocks([torch.zeros(6, 4)], torch.tensor([[1, 6]], dtype=torch.int32))


def test_a_block_or_a_row_that_is_not_there_is_not_moved() -> None:
    caches, packed = [torch.zeros(6, 8), torch.ones(6, 2)], torch.zeros(3, 40, dtype=torch.uint8)
    for pair in ([6, 1], [1, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"outside \[6, 3\]"):
            api.move_blocks(caches, packed, torch.tensor([[2, 1], pair], dtype=torch.int32), True)
    with pytest.raises(ValueError, match="the bytes of a block of all caches, got 48"):
        api.move_blocks(caches, torch.zeros(3, 48, dtype=torch.uint8), torch.tensor([[1, 1]], dtype=torch.int32), True)
    assert not packed.any()


def test_weight_of_another_width_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight must be contiguous float32 \[8\]"):
        api.rms_norm(torch.randn(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual must be float32"):
        api.add_rms_norm(torch.randn(2, 8), torch.randn(1, 8), torch.ones(8), 1e-5)


def test_odd_width_of_gate_and_up_is_named() -> None:
    with pytest.raises(ValueError, match="odd width of 7"):
        api.silu_and_mul(torch.randn(2, 7))


def test_unknown_instruction_set_and_thread_count_are_named() -> None:
    with pytest.raises(ValueError, match="must be avx512, avx2 or baseline"):
        _cpu.use_isa("mmx")
    with pytest.raises(ValueError, match="num_threads must be in"):
        _cpu.set_num_threads(0)
