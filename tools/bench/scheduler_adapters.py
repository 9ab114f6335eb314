# SPDX-License-Identifier: MIT
"""What the scheduler benchmark drives: ours, and others beside it in the same run.

An adapter is built with a `Setup` and has submit(), plan(), advance(). plan() returns something true when a step
was planned and must read whatever an engine would read from the plan, so that lazy views are paid for. advance()
gives every sampling row one token and returns how many requests ended. Single thread, no device.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TOKEN = 7


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_batched_tokens: int


class Adapter(Protocol):
    def __init__(self, setup: Setup) -> None: ...

    def submit(self, request_id: int, token_ids: NDArray[np.int32], max_new_tokens: int) -> None: ...

    def plan(self) -> Any: ...

    def advance(self, plan: Any) -> int: ...


class TokenSpeed:
    """Ours, through the binding."""

    def __init__(self, setup: Setup) -> None:
        from tokenspeed_cc import Scheduler, SchedulerConfig

        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=setup.num_blocks,
                block_size=setup.block_size,
                max_num_seqs=setup.max_num_seqs,
                max_model_len=setup.max_model_len,
                max_batched_tokens=setup.max_batched_tokens,
                chunked_prefill=True,
                overlap_depth=0,
                verify_width=1,
                max_decode_gap_tokens=setup.max_batched_tokens,
                enable_prefix_caching=True,
                eos_token_ids=[],
            )
        )
        rows = setup.max_num_seqs
        self.tokens = np.full((rows, 1), TOKEN, np.int32)

    def submit(self, request_id: int, token_ids: NDArray[np.int32], max_new_tokens: int) -> None:
        from tokenspeed_cc import RequestSpec

        self.scheduler.submit(
            RequestSpec(
                request_id=request_id,
                token_ids=token_ids,
                max_new_tokens=max_new_tokens,
                min_new_tokens=0,
                stop_token_ids=[],
                ignore_eos=True,
                priority=0,
                cache_salt=0,
                adapter=0,
            )
        )

    def plan(self) -> Any:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        read = (plan.request_ids, plan.slots, plan.query_lens, plan.context_lens, plan.prompt_token_ids)
        changed = (plan.new_slots, plan.block_copies, plan.table_updates)
        return plan.step_id, plan.samples.astype(np.int32), read, changed

    def advance(self, plan: Any) -> int:
        step_id, num_tokens, _, _ = plan
        outcome = self.scheduler.advance(step_id, self.tokens[: len(num_tokens)], num_tokens)
        _ = (outcome.request_ids, outcome.rows, outcome.num_tokens, outcome.completion_tokens)
        return int(np.count_nonzero(outcome.finish))


class TokenSpeedScheduler:
    """The PyPI package tokenspeed-scheduler 0.1.42 (a CPU wheel): pip install tokenspeed-scheduler==0.1.42."""

    def __init__(self, setup: Setup) -> None:
        self.lib = importlib.import_module("tokenspeed_scheduler")
        config = self.lib.SchedulerConfig()
        config.prefix_granularity = setup.block_size
        config.num_device_pages = setup.num_blocks
        config.num_host_pages = 1
        config.num_snapshot_pages = 1
        config.disable_l2_cache = True
        config.max_scheduled_tokens = setup.max_batched_tokens
        config.max_batch_size = setup.max_num_seqs
        config.overlap_schedule_depth = 0
        config.enable_mixed_prefill_decode = True
        group = self.lib.CacheGroupConfig("full", setup.block_size, setup.num_blocks, self.lib.AttnKind.Full)
        config.cache_groups = [group]
        self.scheduler = self.lib.Scheduler(config)
        self.left: dict[str, int] = {}
        self.prompt_left: dict[str, int] = {}

    def submit(self, request_id: int, token_ids: NDArray[np.int32], max_new_tokens: int) -> None:
        spec = self.lib.RequestSpec()
        spec.request_id = str(request_id)
        spec.tokens = token_ids.tolist()
        spec.max_new_tokens = max_new_tokens
        self.left[spec.request_id] = max_new_tokens
        self.prompt_left[spec.request_id] = len(token_ids)
        self.scheduler.submit_requests([spec])

    def plan(self) -> Any:
        batches = self.scheduler.next_execution_plan().forward
        rows = []
        for batch in batches:
            ids = batch.request_ids
            lengths = batch.input_lengths
            _ = (batch.request_pool_indices, batch.input_ids, batch.block_tables_arrays())
            prefixes = batch.extend_prefix_lens
            prompts = batch.prefill_lengths
            for row, request_id in enumerate(ids):
                extends = row < batch.num_extends()
                samples = not extends or prefixes[row] + lengths[row] >= prompts[row]
                rows.append((request_id, samples))
        return rows or None

    def advance(self, plan: Any) -> int:
        event = self.lib.ExecutionEvent()
        ended = 0
        for request_id, samples in plan:
            result = self.lib.ForwardEvent.ExtendResult()
            result.request_id = request_id
            result.tokens = [TOKEN] if samples else []
            event.add_event(result)
            if not samples:
                continue
            self.left[request_id] -= 1
            if self.left[request_id] == 0:
                finish = self.lib.ForwardEvent.Finish()
                finish.request_id = request_id
                event.add_event(finish)
                ended += 1
        self.scheduler.advance(event)
        return ended
