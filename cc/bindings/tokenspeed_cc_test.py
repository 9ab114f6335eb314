# SPDX-License-Identifier: MIT
"""The binding: names, shapes, dtypes, views and errors. What the scheduler decides is tested in C++."""

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenspeed_cc
from tokenspeed_cc import (
    FINISH_ABORT,
    FINISH_LENGTH,
    BlockStored,
    CacheGroup,
    Plan,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
)

CONFIG: dict[str, Any] = {
    "num_blocks": 33,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_batched_tokens": 16,
    "chunked_prefill": True,
    "overlap_depth": 1,
    "verify_width": 1,
    "max_decode_gap_tokens": 16,
    "enable_prefix_caching": True,
    "eos_token_ids": [2],
}


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**{**CONFIG, **changes}))


def spec(request_id: int, num_tokens: int, **changes: Any) -> RequestSpec:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": np.arange(10, 10 + num_tokens, dtype=np.int32),
        "max_new_tokens": 3,
        "min_new_tokens": 0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "priority": 0,
        "cache_salt": 0,
        "adapter": 0,
    }
    return RequestSpec(**{**fields, **changes})


def planned(s: Scheduler) -> Plan:
    plan = s.plan()
    assert plan is not None
    return plan


def test_a_plan_has_the_documented_shapes_and_dtypes() -> None:
    s = scheduler()
    s.submit(spec(7, 6))
    plan = planned(s)
    assert (plan.step_id, plan.num_rows, plan.num_decode_rows) == (0, 1, 0)
    assert plan.request_ids.dtype == np.int64 and plan.request_ids.tolist() == [7]
    assert plan.query_lens.dtype == np.int32 and plan.query_lens.tolist() == [6]
    assert plan.context_lens.tolist() == [0]
    assert plan.samples.dtype == np.bool_ and plan.samples.tolist() == [True]
    assert plan.prompt_token_ids.tolist() == list(range(10, 16))
    assert plan.new_slot_request_ids.tolist() == [7]
    assert plan.block_copies.shape == (0, 2)
    assert plan.table_updates.shape == (2, 3)


def test_arrays_are_views_that_cannot_be_written_and_outlive_the_plan() -> None:
    s = scheduler()
    s.submit(spec(7, 6))
    tokens = planned(s).prompt_token_ids
    gc.collect()
    assert tokens.tolist() == list(range(10, 16))
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_block_tables_are_one_live_view() -> None:
    s = scheduler()
    tables = s.block_tables()
    assert tables.dtype == np.int32 and tables.shape == (8, 16)
    s.submit(spec(7, 6))
    plan = planned(s)
    assert np.count_nonzero(tables[plan.slots[0]]) == 2
    assert s.block_tables().ctypes.data == tables.ctypes.data


def test_a_request_runs_to_its_length() -> None:
    s = scheduler(overlap_depth=0)
    s.submit(spec(7, 6))
    emitted = []
    finish = 0
    while s.has_work():
        plan = planned(s)
        outcome = s.advance(plan.step_id, np.array([[5]], np.int32), np.array([1], np.int32))
        emitted += [5] * int(outcome.num_tokens.sum())
        finish = int(outcome.finish[-1])
        assert outcome.prompt_tokens.tolist() == [6]
        assert outcome.cached_tokens.tolist() == [0]
        assert outcome.matched_tokens.tolist() == [-1]
        s.check()
    assert len(emitted) == 3
    assert finish == FINISH_LENGTH
    assert s.stats(7).completion_tokens == 3
    load = s.load()
    assert load.active_blocks == 0
    assert load.cached_blocks + load.free_blocks == load.total_blocks == 32


def test_abort_answers_once() -> None:
    s = scheduler()
    s.submit(spec(7, 6))
    ended = s.abort(7)
    assert ended is not None
    assert (ended.request_id, ended.finish, ended.prompt_tokens) == (7, FINISH_ABORT, 6)
    assert s.abort(7) is None


def test_refusals_are_value_errors_with_a_reason() -> None:
    s = scheduler()
    s.submit(spec(7, 6))
    with pytest.raises(ValueError, match="request_id 7 is in use"):
        s.submit(spec(7, 6))
    with pytest.raises(ValueError, match="max_model_len 64"):
        s.submit(spec(8, 62))
    with pytest.raises(ValueError, match="one dimension"):
        spec(8, 4, token_ids=np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="block_size must be positive"):
        scheduler(block_size=0)
    with pytest.raises(ValueError, match="no step is in flight"):
        s.advance(0, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="token_ids must be"):
        s.advance(0, np.zeros(1, np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="request_id 99 is unknown"):
        s.stats(99)
    with pytest.raises(TypeError):
        SchedulerConfig(num_blocks=3)  # type: ignore[call-arg]


def test_kv_events_carry_hash_parent_and_tokens() -> None:
    s = scheduler(overlap_depth=0)
    s.enable_kv_events()
    s.submit(spec(7, 8, max_new_tokens=1))
    plan = planned(s)
    s.advance(plan.step_id, np.array([[5]], np.int32), np.array([1], np.int32))
    first, second = s.kv_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.parent_hash is None
    assert second.parent_hash == first.block_hash
    assert first.token_ids == [10, 11, 12, 13]
    assert s.flush_cache()
    assert [type(e).__name__ for e in s.kv_events()] == ["AllBlocksCleared"]


def test_groups_have_tables_and_plans_of_their_own() -> None:
    full = CacheGroup(kind="full", blocks_per_parent=1, window_tokens=0, checkpoint_tokens=0)
    state = CacheGroup(kind="state", blocks_per_parent=2, window_tokens=0, checkpoint_tokens=8)
    s = scheduler(groups=[full, state])
    s.submit(spec(7, 10))
    plan = planned(s)
    (group,) = plan.groups
    assert plan.query_lens.tolist() == [8]
    assert group.table_updates.shape == (1, 3)
    assert group.copies.shape == (0, 2)
    assert group.saves.shape == (1, 2)
    assert s.block_tables(1).shape == (8, 1)
    assert s.block_tables(1)[plan.slots[0], 0] == group.saves[0, 0]
    with pytest.raises(ValueError, match="group 2 does not exist"):
        s.block_tables(2)
    with pytest.raises(ValueError, match="kind is unknown"):
        CacheGroup(kind="sparse", blocks_per_parent=1, window_tokens=0, checkpoint_tokens=0)


def test_the_stub_names_everything_the_module_has() -> None:
    text = (Path(__file__).parent / "tokenspeed_cc.pyi").read_text()
    for name, value in vars(tokenspeed_cc).items():
        if name.startswith("_"):
            continue
        assert re.search(rf"^(class )?{name}\b", text, re.MULTILINE), name
        if isinstance(value, type):
            after = re.split(rf"^class {name}\b", text, maxsplit=1, flags=re.MULTILINE)[1]
            body = re.split(r"^class ", after, maxsplit=1, flags=re.MULTILINE)[0]
            for attribute in (a for a in vars(value) if not a.startswith("_")):
                documented = re.search(rf"^    (def )?{attribute}\b", body, re.MULTILINE) or name == "RequestSpec"
                assert documented, f"{name}.{attribute}"
