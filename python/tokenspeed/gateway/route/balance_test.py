# SPDX-License-Identifier: MIT
"""The tuning of cache_aware and least_load: each flag changes one choice, and the same choice without it is another."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.config.gateway import parse_launch
from tokenspeed.gateway.route.head_index import HeadIndex
from tokenspeed.gateway.route.kv_index import WorkerBlocks
from tokenspeed.gateway.route.policies import make_policy
from tokenspeed.gateway.route.policy import Asked, Policy
from tokenspeed.gateway.route.token_tree import TokenTree


@dataclass(frozen=True)
class Load:
    """A worker as policies see one."""

    url: str
    num_in_flight: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    num_pending_tokens: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0
    ready_s: float = 0.0
    blocks: WorkerBlocks = field(default_factory=WorkerBlocks)


IDLE = [Load("a"), Load("b")]
PROMPT = Asked(list(range(1000)), "")


def policy(name: str, *words: str) -> Policy:
    return make_policy(parse_launch(["--worker-urls", "ipc:///a", "--policy", name, *words]).routing)


def chosen(policy: Policy, workers: Sequence[Load], asked: Asked = PROMPT) -> tuple[str, str]:
    choice = policy.choose(workers, asked)
    return choice.worker.url, choice.branch


def caching(num_blocks: int, first: Sequence[int] = ()) -> WorkerBlocks:
    """A worker with KV events that holds so many blocks of two tokens; those of `first` come first."""
    blocks = WorkerBlocks()
    blocks.followed = True
    tokens = [*first, *range(10**6, 10**6 + 2 * num_blocks)][: 2 * num_blocks]
    parent = None
    for number in range(num_blocks):
        blocks.of_rank(0).store(number, parent, tokens[2 * number : 2 * number + 2], None)
        parent = number
    blocks.was_told()
    return blocks


# ---- least_load ------------------------------------------------------------------------------------------------------


def test_least_load_waits_least_by_tokens_that_are_not_computed_and_by_requests_that_others_queue() -> None:
    least = policy("least_load")
    long = Load("a", num_in_flight=1, num_waiting=1, num_pending=1, num_pending_tokens=50_000)
    short = Load("b", num_in_flight=9, num_waiting=9, num_pending=9, num_pending_tokens=9_000)
    assert chosen(least, [long, short]) == ("b", "load")
    assert chosen(least, [Load("a", num_waiting=3), Load("b", num_in_flight=2)])[0] == "b"
    assert chosen(least, [Load("a", num_in_flight=3), Load("b", num_in_flight=2)])[0] == "b"


def test_least_load_prices_a_queued_request_by_its_mean_prefill() -> None:
    workers = [Load("a", num_waiting=2), Load("b", num_in_flight=1, num_pending=1, num_pending_tokens=1000)]
    assert chosen(policy("least_load"), workers)[0] == "b"
    assert chosen(policy("least_load", "--least-load-mean-prefill-tokens", "100"), workers)[0] == "a"


def test_least_load_avoids_full_pools_as_much_as_the_weight_says() -> None:
    workers = [Load("a", kv_usage=0.9), Load("b", num_pending=1, num_pending_tokens=1000)]  # 1.35 s and 0.5 s
    assert chosen(policy("least_load"), workers)[0] == "b"
    assert chosen(policy("least_load", "--least-load-kv-pressure-weight", "0.01"), workers)[0] == "a"
    assert chosen(policy("least_load"), [Load("a", kv_usage=1.0), Load("b", kv_usage=0.5)])[0] == "b"


def test_least_load_believes_the_rate_that_a_worker_shows_and_else_the_default() -> None:
    slow = Load("a", num_pending_tokens=1000, num_pending=1, tokens_per_s=10)
    quick = Load("b", num_pending_tokens=5000, num_pending=1, tokens_per_s=1000)
    assert chosen(policy("least_load"), [slow, quick])[0] == "b"
    unknown = [replace(worker, tokens_per_s=0.0) for worker in (slow, quick)]
    assert chosen(policy("least_load"), unknown)[0] == "a"
    pressed = [Load("a", kv_usage=0.5), Load("b", num_pending_tokens=100, num_pending=1)]  # 0.15 s against 100 tokens
    assert chosen(policy("least_load"), pressed)[0] == "b"
    assert chosen(policy("least_load", "--least-load-default-throughput", "100"), pressed)[0] == "a"


def test_least_load_passes_a_worker_whose_queue_is_at_its_cap() -> None:
    workers = [Load("a", num_waiting=2), Load("b", kv_usage=0.99)]
    assert chosen(policy("least_load"), workers)[0] == "a"
    assert chosen(policy("least_load", "--least-load-max-waiting-requests", "2"), workers)[0] == "b"
    full = [replace(worker, num_waiting=2) for worker in workers]
    assert chosen(policy("least_load", "--least-load-max-waiting-requests", "2"), full)[0] == "a"


# ---- cache_aware: when the holder is passed --------------------------------------------------------------------------


def held_by_a(*words: str) -> Policy:
    made = policy("cache_aware", *words)
    assert chosen(made, IDLE) == ("a", "expected_wait_fallback")
    return made


def test_a_small_pool_spills_long_before_the_threshold_and_a_price_of_prefixes_holds_it_back() -> None:
    busy = [Load("a", 12), Load("b", 0)]  # mean 6: twice its root is 4.9
    assert chosen(held_by_a(), busy) == ("b", "spill")
    assert chosen(held_by_a("--balance-prefix-margin-tokens", "100"), busy) == ("a", "tree_match")  # 10 requests
    assert chosen(held_by_a("--balance-prefix-margin-tokens", "500"), busy) == ("b", "spill")
    assert chosen(held_by_a("--balance-prefix-margin-tokens", "1", "--balance-abs-threshold", "5"), busy)[1] == "spill"


def test_pools_that_differ_too_much_or_are_too_full_count_for_more_than_caches() -> None:
    full = [Load("a", kv_usage=0.9), Load("b", num_in_flight=1, kv_usage=0.2)]
    assert chosen(held_by_a(), full) == ("a", "tree_match")
    assert chosen(held_by_a("--balance-token-usage-threshold", "0.8"), full) == ("a", "tree_match")
    assert chosen(held_by_a("--balance-token-usage-threshold", "0.5"), full)[1] == "kv_spread"
    assert chosen(held_by_a("--overload-token-usage-threshold", "0.8"), full) == ("b", "kv_ceiling")
    both = [replace(worker, kv_usage=0.9) for worker in full]
    assert chosen(held_by_a("--overload-token-usage-threshold", "0.8"), both) == ("a", "tree_match")


def test_a_prompt_that_nobody_holds_goes_where_the_fewest_tokens_wait() -> None:
    workers = [Load("a", 1, 1, num_pending=1, num_pending_tokens=100_000), Load("b", 5)]
    assert chosen(policy("cache_aware"), workers) == ("b", "expected_wait_fallback")


def test_what_a_worker_holds_of_a_prompt_is_credited_when_that_is_asked_for() -> None:
    assert held_by_a().choose(IDLE, PROMPT).credit == 0
    longer = Asked([*PROMPT.tokens, *range(5000, 5500)], "")
    assert held_by_a("--balance-uncached-credit").choose(IDLE, longer).credit == 1000
    assert policy("cache_aware", "--balance-uncached-credit").choose(IDLE, PROMPT).credit == 0


def test_a_backlog_takes_from_what_a_worker_holds_by_the_decay() -> None:
    def first(*words: str) -> str:
        made = policy("cache_aware", *words)
        made.choose([Load("a"), Load("b", 9)], PROMPT)
        made.choose([Load("a", 9), Load("b")], Asked(PROMPT.tokens[:800], ""))
        made.choose([Load("b")] * 2, Asked(PROMPT.tokens[:800], ""))
        return chosen(made, [Load("a", num_pending=1, num_pending_tokens=2000), Load("b")])[0]

    assert first() == "a"
    assert first("--overlap-decay", "0.1") == "a"  # 1000 / 1.2 of a against 800 of b
    assert first("--overlap-decay", "0.2") == "b"  # 1000 / 1.4


def test_the_share_that_was_found_is_told_whatever_came_of_it() -> None:
    made = held_by_a()
    assert made.choose(IDLE, PROMPT).overlap == 1.0
    assert made.choose(IDLE, Asked([*PROMPT.tokens[:500], *range(9000, 9500)], "")).overlap == 0.5
    assert made.choose(IDLE, Asked([7, 7], "")).overlap == 0.0
    assert made.choose(IDLE[:1], PROMPT).overlap is None


def test_temperature_spreads_choices_over_those_that_hold_something() -> None:
    first = list(range(8))
    workers = [Load("a", blocks=caching(4, first)), Load("b", blocks=caching(3, first))]

    def counts(*words: str) -> Counter[str]:
        made = policy("cache_aware", "--worker-warmup-divert-every", "0", *words)
        return Counter(chosen(made, workers, Asked(first, ""))[0] for _ in range(300))

    assert counts() == {"a": 300}
    drawn = counts("--selection-temperature", "1")  # 1 to e
    assert 40 < drawn["b"] < 130
    assert counts("--selection-temperature", "0.01") == {"a": 300}


# ---- cache_aware: heads ----------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_heads_are_found_at_the_deepest_boundary_for_as_long_as_they_live() -> None:
    clock = Clock()
    index = HeadIndex([2, 4], 10, clock)
    index.insert(array("I", [1, 2, 3, 4, 5]), "a")
    clock.now_s += 6
    index.insert(array("I", [1, 2, 9, 9]), "b")
    assert index.match(array("I", [1, 2, 3, 4, 7])) == {"a": 4, "b": 2}
    assert index.match(array("I", [1, 2, 3])) == {"a": 2, "b": 2}
    assert index.match(array("I", [1])) == {}
    assert (index.num_remembered, index.num_held("a")) == (4, 2)
    clock.now_s += 6
    assert index.match(array("I", [1, 2, 3, 4])) == {"b": 2}
    index.forget("b")
    assert (index.num_remembered, index.num_held("b"), index._urls) == (0, 0, {})


def test_a_policy_with_heads_keeps_conversations_and_no_tokens() -> None:
    made = policy("cache_aware", "--cache-index", "hash", "--cache-boundaries", "512,128")
    assert chosen(made, IDLE) == ("a", "expected_wait_fallback")
    assert chosen(made, IDLE, Asked([*range(600), *range(2000, 2700)], "")) == ("a", "tree_match")
    assert made.num_remembered == 2
    assert chosen(made, IDLE, Asked(list(range(100)), "")) == ("b", "expected_wait_fallback")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache-index", "hash"], "--cache-index: hash remembers the heads"),
        (["--cache-boundaries", "64"], "--cache-boundaries: the tree remembers"),
        (["--cache-index", "hash", "--cache-boundaries", "64,x"], "--cache-boundaries: '64,x' are not"),
        (["--selection-policy", "mine"], "--selection-policy: 'mine' is not one of"),
        (["--worker-warmup-share", "2"], "--worker-warmup-share: must be in"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        policy("cache_aware", *words)


# ---- cache_aware: warm-up --------------------------------------------------------------------------------------------

NEW_PROMPTS = [Asked([n * 1000 + i for i in range(50)], "") for n in range(1, 41)]


def branches(made: Policy, workers: Sequence[Load], prompts: Sequence[Asked] = NEW_PROMPTS) -> Counter[tuple[str, str]]:
    return Counter(chosen(made, workers, asked) for asked in prompts)


def test_one_miss_in_four_goes_to_a_thin_worker_even_when_it_is_the_busiest() -> None:
    workers = [Load("a", 0, blocks=caching(3000)), Load("b", 9, blocks=caching(10))]
    counted = branches(policy("cache_aware"), workers)
    assert counted == {("a", "expected_wait_fallback"): 30, ("b", "warm_up"): 10}
    assert branches(policy("cache_aware", "--worker-warmup-share", "0"), workers)["b", "warm_up"] == 0
    assert branches(policy("cache_aware", "--worker-warmup-thin-ratio", "0"), workers)["b", "warm_up"] == 0


def test_a_thin_worker_is_warm_when_it_has_grown_and_thin_again_when_it_is_emptied() -> None:
    made = policy("cache_aware", "--worker-warmup-blocks", "100")

    def warmed(num_blocks: int) -> int:
        workers = [Load("a", blocks=caching(3000)), Load("b", 9, blocks=caching(num_blocks))]
        prompts = [Asked([num_blocks, *asked.tokens], "") for asked in NEW_PROMPTS]
        return branches(made, workers, prompts)["b", "warm_up"]

    assert [warmed(10), warmed(109)] == [10, 10]
    assert warmed(1600) == 0
    assert warmed(0) == 10


def test_a_worker_is_new_for_a_while_however_much_the_others_hold() -> None:
    def warmed(ready_s: float, *words: str) -> int:
        workers = [Load("a", blocks=caching(20)), Load("b", 9, ready_s=ready_s, blocks=caching(15))]
        return branches(policy("cache_aware", *words), workers)["b", "warm_up"]

    now_s = time.monotonic()
    assert warmed(now_s) == 10
    assert warmed(now_s - 61) == 0
    assert warmed(now_s, "--worker-warmup-secs", "0") == 0
    assert warmed(now_s, "--worker-warmup-blocks", "15") == 0


def test_some_hits_go_to_a_thin_worker_that_is_idle() -> None:
    first = list(range(50))
    holder = Load("a", blocks=caching(3000, first))
    asked = [Asked([*first, n], "") for n in range(32)]
    thin = Load("b", blocks=caching(0))
    diverted = branches(policy("cache_aware"), [holder, thin], asked)
    assert 2 <= diverted["b", "divert"] <= 4
    assert branches(policy("cache_aware"), [holder, replace(thin, num_in_flight=1)], asked)["b", "divert"] == 0
    never = policy("cache_aware", "--worker-warmup-divert-every", "0")
    assert branches(never, [holder, thin], asked) == {("a", "event_match"): 32}


def test_workers_without_events_are_never_warmed() -> None:
    def unknown() -> bool:
        counted = branches(policy("cache_aware"), [Load("a"), Load("b", 9)])
        return counted == {("a", "expected_wait_fallback"): 40}

    assert unknown()


def test_a_record_of_either_kind_gives_what_the_policy_asks() -> None:
    makers: list[Callable[[], TokenTree | HeadIndex]] = [
        lambda: TokenTree(100),
        lambda: HeadIndex([3], 60, time.monotonic),
    ]
    for make in makers:
        record = make()
        record.insert(array("I", [1, 2, 3]), "a")
        assert record.match(array("I", [1, 2, 3, 4])) == {"a": 3}
        assert record.num_remembered and record.num_held("a")
        record.forget("a")
        assert not record.num_remembered and not record.match(array("I", [1, 2, 3]))
