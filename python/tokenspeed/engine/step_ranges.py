# SPDX-License-Identifier: MIT
"""Names for what Nsight Systems shows of the loop (`--enable-nvtx`): a range a step, and one a part of it.

The parts are those of the step time's metric: plan, launch, device, settle. They nest on the loop's thread. A step
begins when it is launched and ends when it has settled, so with overlap two steps' ranges cross.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from tokenspeed_cc import Plan

logger = logging.getLogger("tokenspeed.engine")

_UNMARKED = nullcontext()


class StepRanges(Protocol):
    def part(self, name: str) -> AbstractContextManager[None]: ...

    def step_begins(self, plan: Plan) -> None: ...

    def step_ends(self, plan: Plan) -> None: ...


class NoRanges:
    """Marks nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:
        return _UNMARKED

    def step_begins(self, plan: Plan) -> None:
        return

    def step_ends(self, plan: Plan) -> None:
        return


class NvtxRanges:
    """Through torch.cuda.nvtx. Raises RuntimeError where torch is built without it."""

    def __init__(self) -> None:
        torch.cuda.nvtx.mark("tokenspeed: steps are marked")
        self._steps: dict[int, int] = {}
        """The handles of open ranges, by step."""

    def part(self, name: str) -> AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name)

    def step_begins(self, plan: Plan) -> None:
        num_prefills = plan.num_rows - plan.num_decode_rows
        text = f"step {plan.step_id}: {plan.num_decode_rows} decode, {num_prefills} prefill"
        self._steps[plan.step_id] = torch.cuda.nvtx.range_start(text)

    def step_ends(self, plan: Plan) -> None:
        torch.cuda.nvtx.range_end(self._steps.pop(plan.step_id))


def step_ranges(wanted: bool, device: torch.device) -> StepRanges:
    """What `--enable-nvtx` means on this device; says so where it means nothing."""
    if not wanted:
        return NoRanges()
    if device.type != "cuda":
        logger.warning("--enable-nvtx: there is nothing to mark on a CPU; see /start_profile")
        return NoRanges()
    return NvtxRanges()
