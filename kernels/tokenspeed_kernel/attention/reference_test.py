# SPDX-License-Identifier: MIT
"""The paged reference equals torch's own attention on the same keys laid out densely."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.attention.reference import paged_attention
from tokenspeed_kernel.numerics.case import Case
from tokenspeed_kernel.numerics.cases import cases

CASES = [pytest.param(case, id=case.label) for case in cases("attention.paged", torch.float32)]


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_dense_scaled_dot_product_attention(case: Case) -> None:
    q, k_cache, v_cache, meta, scale, window = case.args
    out = paged_attention(*case.args)
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
