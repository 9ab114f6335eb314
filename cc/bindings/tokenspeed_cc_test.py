# SPDX-License-Identifier: MIT
"""The binding: names, shapes, dtypes, views and errors. What the scheduler decides is tested in C++."""

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tokenspeed_cc
from tokenspeed_cc import (
    FINISH_ABORT,
    FINISH_LENGTH,
    BlockStored,
    CacheGroup,
    Load,
    Plan,
    RequestCounters,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StoreConfig,
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
    with pytest.raises(ValueError, match="got 2 dimensions"):
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


# Bad input: whatever is handed over, a ValueError names the field and the scheduler is as it was.


def state_of(s: Scheduler, ids: list[int]) -> dict[str, Any]:
    """Everything that can be read of a scheduler, by value."""
    load = s.load()
    counters = {i: {n: getattr(s.stats(i), n) for n in vars(RequestCounters) if n[0] != "_"} for i in ids}
    return {
        "load": {name: getattr(load, name) for name in vars(Load) if name[0] != "_"},
        "tables": s.block_tables().tobytes(),
        "work": s.has_work(),
        "counters": counters,
        "transfers": len(s.transfers()),
        "events": len(s.kv_events()),
    }


def in_the_middle() -> tuple[Scheduler, Plan]:
    """A scheduler with one request decoding, one prefilling and one queued, and a step in flight."""
    s = scheduler(verify_width=2, max_num_seqs=2)
    s.enable_kv_events()
    s.submit(spec(1, 9))
    plan = planned(s)
    s.advance(plan.step_id, np.array([[5, 0]], np.int32), np.array([1], np.int32))
    s.submit(spec(2, 40, token_ids=np.arange(100, 140, dtype=np.int32)))
    s.submit(spec(3, 5, token_ids=np.arange(200, 205, dtype=np.int32)))
    plan = planned(s)
    assert (plan.num_rows, plan.num_decode_rows) == (2, 1)
    s.kv_events()
    return s, plan


def tokens_of(plan: Plan, width: int = 2) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return np.full((plan.num_rows, width), 5, np.int32), np.ones(plan.num_rows, np.int32)


INT32 = np.int32
BAD_SPECS: list[tuple[str, Any, str]] = [
    ("request_id", 1, "request_id 1 is in use"),
    ("request_id", -1, "request_id must not be negative"),
    ("request_id", 2**70, "request_id does not fit into 64 bits"),
    ("request_id", "a", "request_id must be an integer, got str"),
    ("request_id", None, "request_id must be an integer, got NoneType"),
    ("token_ids", np.zeros(0, INT32), "token_ids is empty"),
    ("token_ids", np.array([3, -7], INT32), r"token_ids\[1\] is negative: -7"),
    ("token_ids", np.zeros(4, np.int64), "token_ids must be a numpy array of int32, got one of int64"),
    ("token_ids", np.zeros(4, np.float32), "token_ids must be a numpy array of int32, got one of float32"),
    ("token_ids", np.zeros(4, ">i4"), "token_ids must be a numpy array of int32, got one of >i4"),
    ("token_ids", np.zeros((2, 2), INT32), r"token_ids must be \[tokens\], got 2 dimensions"),
    ("token_ids", np.zeros((), INT32), r"token_ids must be \[tokens\], got 0 dimensions"),
    ("token_ids", [1.5, 2.5], "token_ids must be a numpy array of int32, got list"),
    ("token_ids", None, "token_ids must be a numpy array of int32, got NoneType"),
    ("token_ids", np.broadcast_to(np.zeros(1, INT32), (2**31,)), "token_ids has too many elements"),
    ("token_ids", np.zeros(62, INT32), "exceed max_model_len 64"),
    ("max_new_tokens", 0, "max_new_tokens must be positive, got 0"),
    ("max_new_tokens", -1, "max_new_tokens must be positive, got -1"),
    ("max_new_tokens", 2**31 - 1, "exceed max_model_len 64"),
    ("max_new_tokens", 2**31, "max_new_tokens does not fit into 32 bits: 2147483648"),
    ("max_new_tokens", 1.5, "max_new_tokens must be an integer, got float"),
    ("min_new_tokens", -1, "min_new_tokens must be between"),
    ("min_new_tokens", 4, "min_new_tokens must be between"),
    ("stop_token_ids", [2**40], r"stop_token_ids\[0\] does not fit into 32 bits"),
    ("stop_token_ids", [1, None], r"stop_token_ids\[1\] must be an integer, got NoneType"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of integers, got str"),
    ("ignore_eos", None, "ignore_eos must be True or False, got NoneType"),
    ("ignore_eos", 1, "ignore_eos must be True or False, got int"),
    ("priority", 2_000_000, "priority must be within"),
    ("priority", 2**31, "priority does not fit into 32 bits"),
    ("cache_salt", 2**63, "cache_salt does not fit into 64 bits"),
    ("adapter", None, "adapter must be an integer, got NoneType"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD_SPECS)
def test_a_bad_request_changes_nothing(field: str, value: Any, reason: str) -> None:
    s, _ = in_the_middle()
    before = state_of(s, [1, 2, 3])
    with pytest.raises(ValueError, match=reason):
        s.submit(spec(9, 6, **{field: value}) if field != "request_id" else spec(value, 6))
    assert state_of(s, [1, 2, 3]) == before
    s.check()


BAD_RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"step_id": 0}, "step 1 is next, got step 0"),
    ({"step_id": 2}, "step 1 is next, got step 2"),
    ({"step_id": -1}, "step 1 is next, got step -1"),
    ({"step_id": 2**70}, "step_id does not fit into 64 bits"),
    ({"step_id": None}, "step_id must be an integer, got NoneType"),
    ({"token_ids": np.zeros((1, 2), INT32)}, "the same number of rows"),
    ({"token_ids": np.zeros((3, 2), INT32), "num_tokens": np.ones(3, INT32)}, "step 1 has 2 rows"),
    ({"token_ids": np.zeros((2, 0), INT32)}, "step 1 has 2 rows"),
    ({"token_ids": np.zeros(2, INT32)}, r"token_ids must be \[rows, width\], got 1 dimensions"),
    ({"token_ids": np.zeros((2, 2), np.int64)}, "token_ids must be a numpy array of int32, got one of int64"),
    ({"token_ids": None}, "token_ids must be a numpy array of int32, got NoneType"),
    ({"token_ids": np.full((2, 2), -1, INT32)}, r"token_ids\[0\] holds a negative token id"),
    ({"token_ids": np.broadcast_to(np.zeros(1, INT32), (2, 2**32))}, "token_ids has too many elements"),
    ({"num_tokens": np.zeros(2, INT32)}, r"num_tokens\[0\] must be between 1 and 2, got 0"),
    ({"num_tokens": np.full(2, 3, INT32)}, r"num_tokens\[0\] must be between 1 and 2, got 3"),
    ({"num_tokens": np.full(2, -(2**31), INT32)}, r"num_tokens\[0\] must be between 1 and 2"),
    ({"num_tokens": np.ones(2, np.bool_)}, "num_tokens must be a numpy array of int32, got one of bool"),
    ({"num_tokens": np.ones((2, 1), INT32)}, r"num_tokens must be \[rows\], got 2 dimensions"),
    ({"num_tokens": [1, 1]}, "num_tokens must be a numpy array of int32, got list"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_RESULTS)
def test_a_bad_result_changes_nothing_and_the_step_can_still_settle(changes: dict[str, Any], reason: str) -> None:
    s, plan = in_the_middle()
    before = state_of(s, [1, 2, 3])
    token_ids, num_tokens = tokens_of(plan)
    with pytest.raises(ValueError, match=reason):
        s.advance(**{"step_id": plan.step_id, "token_ids": token_ids, "num_tokens": num_tokens, **changes})
    assert state_of(s, [1, 2, 3]) == before
    s.check()
    assert s.advance(plan.step_id, token_ids, num_tokens).request_ids.tolist() == [1]


def test_a_result_is_taken_once() -> None:
    s, plan = in_the_middle()
    s.advance(plan.step_id, *tokens_of(plan))
    s.kv_events()
    before = state_of(s, [1, 2, 3])
    with pytest.raises(ValueError, match="no step is in flight"):
        s.advance(plan.step_id, *tokens_of(plan))
    assert state_of(s, [1, 2, 3]) == before


def test_results_need_not_be_contiguous_and_later_rows_are_read_right() -> None:
    s, plan = in_the_middle()
    token_ids = np.zeros((4, 6), INT32)
    token_ids[::2, ::3] = [[41, 42], [7, 7]]
    s.advance(plan.step_id, token_ids[::2, ::3], np.array([9, 2, 9, 1, 9], INT32)[1::2])
    s.abort(2)
    while s.stats(1).completion_tokens < 3:  # goes on with its own two tokens
        plan = planned(s)
        s.advance(plan.step_id, *tokens_of(plan))
    s.check()


BAD_CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("submit", (None,), "spec must be a RequestSpec, got NoneType"),
    ("abort", (None,), "request_id must be an integer, got NoneType"),
    ("abort", (2**70,), "request_id does not fit into 64 bits"),
    ("settle_transfer", (5, True, -1), "transfer 5 is not in flight"),
    ("settle_transfer", (-1, True, -1), "transfer -1 is not in flight"),
    ("settle_transfer", (0, None, -1), "ok must be True or False, got NoneType"),
    ("settle_transfer", (0, True, 2**40), "first_token does not fit into 32 bits"),
    ("settle_transfer", (0, True, -1, [True]), "done must be a numpy array of bool, got list"),
    ("transfer_progress", (5, 1), "transfer 5 is no load in flight"),
    ("advance_clock", (-1,), "now_us must not go back"),
    ("pause", ("sleep",), "pause mode is unknown: sleep"),
    ("pause", (None,), "pause mode must be a string, got NoneType"),
    ("set_weight_version", (-1,), "weight version must not be negative"),
    ("set_weight_version", (2**63,), "version does not fit into 64 bits"),
    ("stats", (99,), "request_id 99 is unknown"),
    ("stats", ("1",), "request_id must be an integer, got str"),
    ("block_tables", (1,), "group 1 does not exist"),
    ("block_tables", (-1,), "group -1 does not exist"),
]


@pytest.mark.parametrize(("method", "arguments", "reason"), BAD_CALLS)
def test_a_bad_call_changes_nothing(method: str, arguments: tuple[Any, ...], reason: str) -> None:
    s, plan = in_the_middle()
    before = state_of(s, [1, 2, 3])
    with pytest.raises(ValueError, match=reason):
        getattr(s, method)(*arguments)
    assert state_of(s, [1, 2, 3]) == before
    s.advance(plan.step_id, *tokens_of(plan))
    s.check()


BAD_CONFIGS: list[tuple[str, Any, str]] = [
    ("num_blocks", 1, "num_blocks must be at least 2"),
    ("num_blocks", 2**31 - 1, "num_blocks .* must be at most"),
    ("num_blocks", 2**31, "num_blocks does not fit into 32 bits"),
    ("block_size", 2**31 - 1, "block_size must be at most"),
    ("max_model_len", 2**31 - 1, "max_model_len must be at most"),
    ("max_batched_tokens", 2**31 - 1, "max_batched_tokens must be at most"),
    ("max_num_seqs", 2**31 - 1, "max_num_seqs must be at most"),
    ("overlap_depth", 2**31 - 1, "overlap_depth must be at most"),
    ("overlap_depth", -1, "overlap_depth must not be negative"),
    ("verify_width", 2**31 - 1, "verify_width must be at most"),
    ("num_host_blocks", 2**31 - 1, "num_host_blocks must be at most"),
    ("num_host_blocks", -1, "num_host_blocks must not be negative"),
    ("chunked_prefill", None, "chunked_prefill must be True or False"),
    ("num_layers", 0, "num_layers must be positive"),
    ("load_lead_layers", 2, "load_lead_layers must be at most 1"),
    ("verify_overlap", None, "verify_overlap must be True or False"),
    ("store", 3, "store must be a StoreConfig, got int"),
    ("role", "both", "role is unknown: both"),
    ("role", None, "role must be a string"),
    ("groups", [], "groups is empty"),
    ("groups", [None], "groups must be a CacheGroup, got NoneType"),
    ("groups", None, "groups must be a list of CacheGroup"),
    ("eos_token_ids", [2**40], r"eos_token_ids\[0\] does not fit into 32 bits"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD_CONFIGS)
def test_a_bad_config_is_refused_by_field(field: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        scheduler(**{field: value})


def test_a_scheduler_needs_a_config() -> None:
    with pytest.raises(ValueError, match="config must be a SchedulerConfig, got NoneType"):
        Scheduler(None)  # type: ignore[arg-type]


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


STORE = StoreConfig(
    max_prefetches=2,
    max_puts=2,
    min_blocks=1,
    prefetch_timeout_us=1000,
    put_timeout_us=1000,
    backoff_us=10,
    max_backoff_us=100,
)


def test_a_prefix_comes_from_the_store_through_the_host_tier_and_a_step_runs_behind_its_load() -> None:
    s = scheduler(num_host_blocks=8, store=STORE, num_layers=4, load_lead_layers=1)
    s.advance_clock(500)
    s.submit(spec(7, 10))
    assert s.plan() is None
    (query,) = s.transfers()
    assert (query.kind, query.deadline_us, query.target) == (tokenspeed_cc.TRANSFER_QUERY, 1500, -1)
    assert query.hashes.dtype == np.uint64 and query.hashes.shape == query.parent_hashes.shape == (2,)
    assert query.token_ids.tolist() == list(range(10, 18))
    s.settle_transfer(query.transfer_id, True, -1, np.array([True, True]))
    (get,) = s.transfers()
    assert (get.kind, get.columns.tolist(), get.groups.tolist()) == (tokenspeed_cc.TRANSFER_GET, [0, 1], [0, 0])
    with pytest.raises(ValueError, match="done must have 2 entries, got 1"):
        s.settle_transfer(get.transfer_id, True, -1, np.array([True]))
    s.settle_transfer(get.transfer_id, True, -1, np.array([True, True]))
    assert s.plan() is None
    (load,) = s.transfers()
    assert load.host_blocks.tolist() == get.host_blocks.tolist()
    s.transfer_progress(load.transfer_id, 3)
    plan = planned(s)
    assert plan.context_lens.tolist() == [8]
    assert plan.context_slack.tolist() == [0]
    assert plan.load_waits.tolist() == [[load.transfer_id, 3]]
    with pytest.raises(ValueError, match="has to settle first"):
        s.advance(plan.step_id, *tokens_of(plan))
    s.settle_transfer(load.transfer_id, True, -1)
    s.advance(plan.step_id, *tokens_of(plan))
    stats = s.stats(7)
    assert (stats.cached_tokens, stats.host_tokens, stats.store_tokens) == (8, 0, 8)
    assert s.store_counters().hit_tokens == 8
    s.check()


def test_what_the_store_owes_at_its_deadline_is_cancelled() -> None:
    s = scheduler(num_host_blocks=8, store=STORE)
    s.submit(spec(7, 10))
    assert s.plan() is None
    (query,) = s.transfers()
    s.advance_clock(1000)
    (cancel,) = s.transfers()
    assert (cancel.kind, cancel.target) == (tokenspeed_cc.TRANSFER_CANCEL, query.transfer_id)
    assert planned(s).context_lens.tolist() == [0]
    assert s.store_counters().num_timeouts == 1
    s.settle_transfer(query.transfer_id, False, -1)


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
