# SPDX-License-Identifier: MIT
"""Log-probabilities by torch's top-k instead of a whole sort."""

from __future__ import annotations

import torch

from tokenspeed_kernel.registry import Band, cuda, kernel

_LOW_WORD = 0xFFFFFFFF


@kernel("sampling.logprobs", name="torch", needs=cuda(7), dtypes=(torch.float32,), band=Band.PORTABLE)
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-k over int64 keys: the value's order in the high word, the reversed id in the low, so ties are settled."""
    values = logits.log_softmax(dim=1)
    chosen = values.gather(1, tokens.long()[:, None])[:, 0]
    bits = values.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    reversed_ids = _LOW_WORD - torch.arange(logits.shape[1], device=logits.device)
    best = (order << 32 | reversed_ids).topk(top_n, dim=1).values
    ids = _LOW_WORD - (best & _LOW_WORD)
    return chosen, values.gather(1, ids), ids.int()
