# SPDX-License-Identifier: MIT
"""The paged reference equals torch's own attention on the same keys laid out densely."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.attention.metadata import AttentionMetadata
from tokenspeed_kernel.attention.reference import paged_attention
from tokenspeed_kernel.numerics.case import Case
from tokenspeed_kernel.numerics.cases import cases

# torch's own has no soft cap and no sinks.
CASES = [
    pytest.param(case, id=case.label)
    for case in cases("attention.paged", torch.float32)
    if case.args[6:8] == (0.0, None)
]


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_dense_scaled_dot_product_attention(case: Case) -> None:
    q, *caches, meta, scale, window, _, _, scales = case.args
    out = paged_attention(*case.args)
    k_cache, v_cache = (cache.float() for cache in caches)
    if scales is not None:
        k_cache, v_cache = k_cache * scales[0][..., None], v_cache * scales[1][..., None]
    block_size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    for row, kv_len in enumerate(meta.kv_lens.tolist()):
        first, last = meta.query_start[row : row + 2].tolist()
        at = [int(meta.block_tables[row, i // block_size]) for i in range(kv_len)]
        keys = torch.stack([k_cache[block, :, i % block_size] for i, block in enumerate(at)], dim=1)
        values = torch.stack([v_cache[block, :, i % block_size] for i, block in enumerate(at)], dim=1)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        mask = torch.zeros(last - first, kv_len, dtype=torch.bool)
        for i in range(last - first):
            position = kv_len - (last - first) + i
            mask[i, max(0, position - window + 1) if window else 0 : position + 1] = True
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1), keys, values, attn_mask=mask, scale=scale
        ).transpose(0, 1)
        torch.testing.assert_close(out[first:last], expected, atol=1e-5, rtol=1e-5)


def decode(softcap: float, sinks: torch.Tensor | None, keys: list[float]) -> torch.Tensor:
    """One query 1 with one head over keys of one element; each key's value is its position, one-hot."""
    length = len(keys)
    k_cache = torch.tensor(keys).view(1, 1, length, 1).expand(1, 1, length, length).contiguous()
    v_cache = torch.eye(length).view(1, 1, length, length)
    meta = AttentionMetadata(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        1,
        length,
        1,
    )
    q = torch.zeros(1, 1, length)
    q[0, 0, 0] = 1.0
    return paged_attention(q, k_cache, v_cache, meta, 1.0, 0, softcap, sinks, None)[0, 0]


def test_sink_takes_its_share_of_the_softmax_and_adds_no_value() -> None:
    keys = [0.5, -1.0, 2.0]
    expected = torch.tensor([*keys, 1.5]).softmax(dim=0)[:3]
    torch.testing.assert_close(decode(0.0, torch.tensor([1.5]), keys), expected)
    torch.testing.assert_close(decode(0.0, torch.tensor([-1e9]), keys), torch.tensor(keys).softmax(dim=0))


def test_scores_are_capped_before_the_softmax() -> None:
    keys = [0.5, -40.0, 30.0]
    expected = (5 * torch.tanh(torch.tensor(keys) / 5)).softmax(dim=0)
    torch.testing.assert_close(decode(5.0, None, keys), expected)
