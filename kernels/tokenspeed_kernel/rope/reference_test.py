# SPDX-License-Identifier: MIT
"""The rope reference is the rotation of complex numbers, in place, and leaves unrotated elements alone."""

from __future__ import annotations

import torch

from tokenspeed_kernel.rope.reference import rope


def test_pairs_turn_as_complex_numbers_do() -> None:
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    angles = torch.rand(10, 6)
    positions = torch.tensor([9, 0, 4])
    before = q.clone()
    rope(q, k, positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    turned = torch.complex(before[..., :6], before[..., 6:12]) * torch.polar(
        torch.ones(3, 1, 6), angles[positions][:, None]
    )
    torch.testing.assert_close(q[..., :12], torch.cat([turned.real, turned.imag], dim=-1))
    assert torch.equal(q[..., 12:], before[..., 12:])


def test_scores_depend_on_the_distance_alone() -> None:
    inverse = 1.0 / 100.0 ** (torch.arange(8) / 8)
    angles = torch.arange(50)[:, None] * inverse
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    scores = []
    for at in (3, 40):
        turned_q, turned_k = q.clone(), k.clone()
        rope(turned_q, torch.empty(1, 0, 16), torch.tensor([at + 5]), table)
        rope(torch.empty(1, 0, 16), turned_k, torch.tensor([at]), table)
        scores.append((turned_q * turned_k).sum())
    torch.testing.assert_close(scores[0], scores[1])
