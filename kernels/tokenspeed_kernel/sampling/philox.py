# SPDX-License-Identifier: MIT
"""The noise of seeded sampling: Philox4x32-10 (Salmon et al., SC 2011) turned into Gumbel variates.

A token's noise depends only on (seed, position, token id), so it is the same on every backend and in every batch.
"""

from __future__ import annotations

import torch

ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LARGEST_UNIFORM = 1.0 - 2.0**-24
_MASK = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four output words for four counter words and two key words, all int64 tensors holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        first, second = c0 * ROUND_MULTIPLIERS[0], c2 * ROUND_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & _MASK, (k1 + KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def philox_words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 32-bit word of every token: int64 [S, V] for seeds and positions int64 [S].

    key = (low, high word of seed); counter = (token // 4, low word of position, high word of position, 0);
    the token takes output word token % 4.
    """
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    low, high = (positions & _MASK)[:, None], ((positions >> 32) & _MASK)[:, None]
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    words = philox((groups, low, high, torch.zeros_like(groups)), key)
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise float32 [S, V]: -log(-log(u)), u = min((word >> 8) * 2^-24 + 2^-25, 1 - 2^-24).

    The sum rounds to 1 for the largest words; the cap keeps their noise finite, else they would always win.
    """
    words = philox_words(seeds, positions, vocab_size)
    u = (words >> 8).float() * 2.0**-24 + 2.0**-25
    return -torch.log(-torch.log(u.clamp(max=LARGEST_UNIFORM)))
