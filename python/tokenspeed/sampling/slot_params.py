# SPDX-License-Identifier: MIT
"""Sampling parameters of every slot: arrays on the host, mirrored on the device, gathered by row for a step.

Host arrays are the truth and also say, without asking the device, which features a batch needs. On a CPU the device's
tensors are the same memory; elsewhere all of them (a few KB) are sent, without waiting, after a slot has changed.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config.sampling import SamplingParams


class Feature(IntFlag):
    """What a slot's request needs beyond the largest logit."""

    NOISE = 1
    PENALTIES = 2
    BIAS = 4
    MIN_TOKENS = 8
    RULES = 16


_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
_INTS = ("seed", "min_length")


class SlotParams:
    """One column a slot. `min_length`: sequence length (prompt and output) before which no stop token may come."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._floats = np.zeros((len(_FLOATS), num_slots), np.float32)
        self._ints = np.zeros((len(_INTS), num_slots), np.int64)
        self._top_k = np.zeros((1, num_slots), np.int32)
        self._features = np.zeros(num_slots, np.uint8)
        self._host = [torch.from_numpy(array) for array in (self._floats, self._ints, self._top_k)]
        self._shared = device.type == "cpu"
        self._device = self._host if self._shared else [tensor.to(device) for tensor in self._host]
        self._stale = False

    def set(
        self, slot: int, params: SamplingParams, seed: int, min_length: int, has_rules: bool, held_back: bool
    ) -> Feature:
        """Overwrite the slot; returns the features that its request needs. held_back: stops are barred whatever
        `min_new_tokens` says."""
        # A single candidate makes the draw certain, so it is the greedy path with less work.
        temperature = 0.0 if params.greedy else params.temperature
        self._floats[:, slot] = (
            temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._ints[:, slot] = (seed, min_length)
        # Anything past int32 is past every vocabulary, and keeps all tokens as 0 does.
        self._top_k[0, slot] = params.top_k if 0 < params.top_k < 2**31 else 0
        features = Feature(0)
        if not params.greedy:
            features |= Feature.NOISE
        if params.wants_penalties:
            features |= Feature.PENALTIES
        if params.logit_bias:
            features |= Feature.BIAS
        if params.min_new_tokens > 0 or held_back:
            features |= Feature.MIN_TOKENS
        if has_rules:
            features |= Feature.RULES
        self._features[slot] = features
        self._stale = not self._shared
        return features

    def features(self, host_slots: NDArray[np.int64]) -> Feature:
        """What any of these slots needs."""
        return Feature(int(np.bitwise_or.reduce(self._features[host_slots], initial=0)))

    def refresh(self) -> None:
        """Send what has changed to the device; before the step that reads it."""
        if self._stale:
            # From pageable memory: the source is read before the call returns, so the host may go on changing it.
            for host, device in zip(self._host, self._device):
                device.copy_(host, non_blocking=True)
            self._stale = False

    def floats(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """float32 [S] each: temperature, top_p, min_p, repetition, frequency, presence."""
        return self._device[0].index_select(1, slots).unbind(0)

    def ints(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """int64 [S] each: seed, min_length."""
        return self._device[1].index_select(1, slots).unbind(0)

    def top_k(self, slots: torch.Tensor) -> torch.Tensor:
        """int32 [S]; 0 is off."""
        return self._device[2][0].index_select(0, slots)
