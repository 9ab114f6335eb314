# SPDX-License-Identifier: MIT
"""Policies: each gives its worker by tokens, key and loads, the same every time."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tokenspeed.config.gateway import parse_launch
from tokenspeed.config.gateway_routing import POLICY_NAMES
from tokenspeed.gateway.route.bucket import Bucket
from tokenspeed.gateway.route.cache_aware import CacheAware
from tokenspeed.gateway.route.hashing import ConsistentHashing, PrefixHash
from tokenspeed.gateway.route.kv_index import KvIndex, WorkerBlocks
from tokenspeed.gateway.route.policies import make_policy
from tokenspeed.gateway.route.policy import Asked, Overload, Policy
from tokenspeed.gateway.route.sticky import Manual
from tokenspeed.gateway.route.token_tree import TokenTree


@dataclass(frozen=True)
class Load:
    """A worker as policies see one."""

    url: str
    num_in_flight: int
    num_waiting: int = 0
    num_pending: int = 0
    num_pending_tokens: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0
    ready_s: float = 0.0
    blocks: WorkerBlocks = field(default_factory=WorkerBlocks)


WORKERS = [Load("a", 5), Load("b", 1), Load("c", 3)]
IDLE = [replace(worker, num_in_flight=0) for worker in WORKERS]
NOTHING = Asked([], "")
OVERLOAD = Overload(absolute=4, relative=1.5)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def named(name: str) -> Policy:
    return make_policy(parse_launch(["--worker-urls", "ipc:///a", "--policy", name]).routing)


def chosen(policy: Policy, workers: Sequence[Load], asked: Asked) -> tuple[str, str]:
    choice = policy.choose(workers, asked)
    return choice.worker.url, choice.branch


def cache_aware(*words: str, clock: Callable[[], float] = time.monotonic) -> CacheAware:
    """The policy with thresholds of 4 requests and 1.5 times the mean, and what `words` say."""
    flags = ["--worker-urls", "ipc:///a", "--balance-abs-threshold", "4", *words]
    routing = parse_launch(flags).routing
    return CacheAware(routing.cache, routing.prices, clock)


# ---- by load ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("round_robin", {"a": 20, "b": 20, "c": 20}),
        ("passthrough", {"a": 60}),
        ("least_load", {"b": 60}),
    ],
)
def test_a_policy_gives_each_worker_its_share(name: str, allowed: dict[str, int]) -> None:
    policy = named(name)
    assert Counter(chosen(policy, WORKERS, NOTHING)[0] for _ in range(60)) == allowed


@pytest.mark.parametrize(("name", "never"), [("random", ""), ("power_of_two", "a")])
def test_a_random_policy_uses_all_that_it_may(name: str, never: str) -> None:
    policy = named(name)
    seen = {chosen(policy, WORKERS, NOTHING)[0] for _ in range(300)}
    assert seen == {worker.url for worker in WORKERS} - {never}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_has_its_name_and_takes_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = named(name)
    assert policy.name == name
    assert policy.choose(WORKERS[:1], NOTHING)[0].url == "a"
    assert policy.choose(WORKERS, NOTHING)[0] in WORKERS


# ---- cache_aware -----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_to_the_worker_that_has_enough_of_it() -> None:
    policy = cache_aware("--max-tree-size", "1000")
    system = list(range(100))
    assert chosen(policy, WORKERS, Asked(system, "")) == ("b", "expected_wait_fallback")
    assert chosen(policy, IDLE, Asked([*system, *range(500, 700)], "")) == ("b", "tree_match")  # 100 of 300
    assert chosen(policy, IDLE, Asked([*system, *range(800, 1100)], "")) == (
        "a",
        "expected_wait_fallback",
    )  # 100 of 400
    assert chosen(policy, IDLE, Asked([*system, *range(800, 1100), 7], "")) == ("a", "tree_match")


def test_a_holder_that_is_overloaded_is_passed_by_only_when_both_thresholds_are_crossed() -> None:
    prompt = Asked(list(range(50)), "")

    def with_holder_at(num_in_flight: int, others: int) -> tuple[str, str]:
        policy = cache_aware("--max-tree-size", "1000")
        assert chosen(policy, IDLE, prompt) == ("a", "expected_wait_fallback")
        return chosen(policy, [Load("a", num_in_flight), Load("b", others), Load("c", others)], prompt)

    assert with_holder_at(6, 0) == ("a", "tree_match")  # mean 2, 6 is not more than 2 + 4
    assert with_holder_at(7, 0) == ("b", "spill")  # mean 2.3
    assert with_holder_at(40, 25) == ("a", "tree_match")  # mean 30: far above, but not by half
    assert with_holder_at(70, 25) == ("b", "spill")


def test_new_prompts_spread_over_idle_workers_by_what_each_holds() -> None:
    policy = cache_aware("--max-tree-size", "10000")
    seen = Counter(chosen(policy, IDLE, Asked([n * 100 + i for i in range(50)], ""))[0] for n in range(30))
    assert seen == {"a": 10, "b": 10, "c": 10}


def test_a_worker_that_lost_its_cache_is_no_holder() -> None:
    policy = cache_aware("--max-tree-size", "1000")
    prompt = Asked(list(range(50)), "")
    assert chosen(policy, WORKERS, prompt) == ("b", "expected_wait_fallback")
    policy.forget("b")
    assert policy.num_remembered == 0
    assert chosen(policy, IDLE, prompt) == ("a", "expected_wait_fallback")


def test_the_tree_equals_a_list_of_prompts_while_there_is_room() -> None:
    draw = random.Random(1)
    tree, given = TokenTree(10**6), list[tuple[list[int], str]]()
    for _ in range(400):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 14))]
        expected: dict[str, int] = {}
        for other, url in given:
            common = next((i for i, (x, y) in enumerate(zip(prompt, other)) if x != y), min(len(prompt), len(other)))
            expected[url] = max(expected.get(url, 0), common)
        assert tree.match(prompt) == {url: num for url, num in expected.items() if num}
        given.append((prompt, draw.choice("abc")))
        tree.insert(*given[-1])
        beginnings = {(url, tuple(p[: i + 1])) for p, url in given for i in range(len(p))}
        assert tree.num_tokens == len(beginnings)
        assert all(tree.num_held(url) == sum(u == url for u, _ in beginnings) for url in "abc")


def test_a_full_tree_forgets_what_was_given_longest_ago_and_never_more_than_it_must() -> None:
    tree = TokenTree(20)
    tree.insert([1] * 5 + [2] * 5, "a")
    tree.insert([1] * 5 + [3] * 5, "b")
    assert tree.num_tokens == 20
    tree.insert([1] * 5 + [4] * 3, "b")
    assert tree.num_tokens == 18
    assert tree.match([1] * 5 + [2] * 5) == {"a": 5, "b": 5}
    assert tree.match([1] * 5 + [3] * 5) == {"a": 5, "b": 10}


def test_a_tree_stays_within_its_bound_and_gives_everything_back() -> None:
    draw = random.Random(2)
    tree = TokenTree(60)
    for _ in range(2000):
        tree.insert([draw.randrange(3) for _ in range(draw.randrange(1, 100))], draw.choice("abc"))
        assert tree.num_tokens == sum(tree.num_held(url) for url in "abc") <= 60
    for url in "abc":
        tree.forget(url)
    assert tree.num_tokens == 0 and tree.match([0, 1, 2]) == {}
    assert not tree._root.children and not tree._order


# ---- hashes ----------------------------------------------------------------------------------------------------------


def test_prompts_with_the_same_beginning_share_a_worker_and_others_spread() -> None:
    policy = PrefixHash(4, OVERLOAD)
    homes = {}
    for n in range(300):
        first = chosen(policy, IDLE, Asked([n, 1, 2, 3, 4], ""))
        assert first == chosen(policy, IDLE, Asked([n, 1, 2, 3, 9, 9], "")) and first[1] == "ring_hit"
        homes[n] = first[0]
    assert min(Counter(homes.values()).values()) > 60
    assert len(Counter(homes.values())) == 3


def test_an_overloaded_home_is_passed_by_to_the_next_on_the_ring() -> None:
    policy = PrefixHash(4, OVERLOAD)
    home, _ = chosen(policy, IDLE, Asked([1, 2], ""))
    busy = [replace(worker, num_in_flight=7 if worker.url == home else 0) for worker in IDLE]
    other, branch = chosen(policy, busy, Asked([1, 2], ""))
    assert branch == "load_balance_walk" and other != home
    assert chosen(policy, busy, Asked([1, 2], "")) == (other, branch)


def test_a_worker_that_leaves_moves_its_own_keys_only_and_gets_them_back() -> None:
    policy = ConsistentHashing()
    asked = [Asked([], f"user-{n}") for n in range(300)]
    before = [chosen(policy, WORKERS, one) for one in asked]
    without_b = [chosen(policy, [WORKERS[0], WORKERS[2]], one) for one in asked]
    assert {branch for _, branch in before} == {"routing_key_hit"}
    assert {url for url, _ in before} == {"a", "b", "c"}
    assert all(old == new for old, new in zip(before, without_b) if old[0] != "b")
    assert [chosen(policy, WORKERS, one) for one in asked] == before
    assert chosen(policy, WORKERS, NOTHING) == ("b", "no_routing_key")


# ---- manual ----------------------------------------------------------------------------------------------------------


def test_a_key_stays_with_its_worker_until_it_has_been_idle_for_too_long() -> None:
    clock = Clock()
    policy = Manual(60, "min_load", clock)
    key = Asked([], "k")
    assert chosen(policy, WORKERS, key) == ("b", "vacant")
    clock.now_s += 60
    assert chosen(policy, [Load("a", 0), Load("b", 99)], key) == ("b", "occupied_hit")
    clock.now_s += 60.5
    assert chosen(policy, [Load("a", 0), Load("b", 99)], key) == ("a", "vacant")
    clock.now_s += 61
    assert chosen(policy, WORKERS, NOTHING) == ("b", "no_routing_id")
    assert policy.num_remembered == 0


def test_a_key_whose_worker_is_away_has_a_second_one_and_comes_back() -> None:
    policy = Manual(60, "min_load", Clock())
    key = Asked([], "k")
    assert chosen(policy, WORKERS, key) == ("b", "vacant")
    assert chosen(policy, [WORKERS[0], WORKERS[2]], key) == ("c", "occupied_miss")
    assert chosen(policy, [Load("a", 0), Load("c", 50)], key) == ("c", "occupied_hit")
    assert chosen(policy, WORKERS, key) == ("b", "occupied_hit")
    assert chosen(policy, WORKERS[:1], key) == ("a", "occupied_miss")
    assert chosen(policy, WORKERS, key) == ("c", "occupied_hit")


def test_min_group_gives_every_worker_as_many_keys_and_random_uses_all() -> None:
    policy = Manual(60, "min_group", Clock())
    assert Counter(chosen(policy, WORKERS, Asked([], str(n)))[0] for n in range(30)) == {"a": 10, "b": 10, "c": 10}
    policy = Manual(60, "random", Clock())
    assert {chosen(policy, WORKERS, Asked([], str(n)))[0] for n in range(200)} == {"a", "b", "c"}


# ---- bucket ----------------------------------------------------------------------------------------------------------


def test_prompts_go_by_length_to_workers_that_get_the_same_number_of_tokens() -> None:
    clock = Clock()
    policy = Bucket(5.0, OVERLOAD, clock)
    assert chosen(policy, WORKERS, Asked([1] * 10, "")) == ("b", "unknown")
    for _ in range(90):
        policy.choose(IDLE, Asked([1] * 10, ""))
    for _ in range(9):
        policy.choose(IDLE, Asked([1] * 100, ""))
    policy.choose(IDLE, Asked([1] * 900, ""))
    clock.now_s += 5
    assert chosen(policy, IDLE, Asked([1] * 9, "")) == ("a", "bucket")
    assert chosen(policy, IDLE, Asked([1] * 100, "")) == ("b", "bucket")
    assert chosen(policy, IDLE, Asked([1] * 5000, "")) == ("c", "bucket")
    busy = [replace(IDLE[0], num_in_flight=40), *IDLE[1:]]
    assert chosen(policy, busy, Asked([1] * 9, "")) == ("b", "spill")
    assert chosen(policy, IDLE[:2], Asked([1] * 6000, "")) == ("b", "bucket")


# ---- loads that engines tell, keys on any policy ---------------------------------------------------------------------


def test_power_of_two_passes_the_worker_whose_engine_queues() -> None:
    queueing = [Load("a", 0, num_waiting=5), Load("b", 3, num_waiting=0)]
    assert chosen(named("power_of_two"), queueing, NOTHING)[0] == "b"
    words = ["--worker-urls", "ipc:///a", "--policy", "power_of_two", "--power-of-two-load-metric", "requests"]
    assert chosen(make_policy(parse_launch(words).routing), queueing, NOTHING)[0] == "a"


def test_a_key_keeps_its_worker_on_any_policy_when_that_is_asked_for() -> None:
    words = ["--worker-urls", "ipc:///a", "--policy", "round_robin", "--sticky-sessions"]
    policy = make_policy(parse_launch(words).routing)
    home = chosen(policy, IDLE, Asked([], "alice"))[0]
    assert {chosen(policy, IDLE, Asked([], "alice"))[0] for _ in range(9)} == {home}
    assert {chosen(policy, IDLE, NOTHING)[0] for _ in range(9)} == {"a", "b", "c"}


# ---- KV events -------------------------------------------------------------------------------------------------------


def blocks_of(*chain: Sequence[int]) -> WorkerBlocks:
    """A worker that has told of these blocks, each the child of the one before."""
    blocks = WorkerBlocks()
    parent = None
    for number, tokens in enumerate(chain, 1):
        blocks.of_rank(0).store(number, parent, tokens, None)
        parent = number
    blocks.was_told()
    return blocks


def test_a_prompt_goes_to_the_worker_whose_engine_says_that_it_has_it_cached() -> None:
    policy = cache_aware("--cache-threshold", "0.5", "--max-tree-size", "1000")
    asked = Asked([1, 2, 3, 4, 5, 6], "")
    assert chosen(policy, [Load("a", 0), Load("b", 1)], asked) == ("a", "expected_wait_fallback")
    holder = Load("b", 1, blocks=blocks_of([1, 2], [3, 4]))
    assert chosen(policy, [Load("a", 0), holder], asked) == ("b", "event_match")
    assert chosen(policy, [Load("a", 0), replace(holder, num_in_flight=30)], asked) == ("a", "spill")


def test_what_an_engine_has_not_told_yet_is_known_by_the_record() -> None:
    policy = cache_aware("--cache-threshold", "0.5", "--max-tree-size", "1000")
    told = [Load("a", 0, blocks=blocks_of([9, 9])), Load("b", 0, blocks=blocks_of([8, 8]))]
    first, branch = chosen(policy, told, Asked([1, 2, 3, 4], ""))
    assert branch == "expected_wait_fallback"
    assert chosen(policy, told, Asked([1, 2, 3, 4], "")) == (first, "tree_match")


def test_the_index_follows_stores_removals_and_tiers() -> None:
    index = KvIndex()
    prompt = array("I", [1, 2, 3, 4, 5])
    assert index.match(prompt) == 0
    index.store(10, None, [1, 2], None)
    index.store(11, 10, [3, 4], None)
    index.store(11, 10, [3, 4], "CPU_TIER1")
    index.store(99, 77, [1, 2], None)  # of a parent that was never told
    assert (index.match(prompt), index.num_blocks, index.num_tokens) == (4, 3, 6)
    index.remove(11, None)
    assert index.match(prompt) == 4
    index.remove(11, "CPU_TIER1")
    index.remove(12, None)
    assert index.match(prompt) == 2
    index.store(20, None, [1, 2], None)  # the same tokens under another identity
    index.remove(10, None)
    assert index.match(prompt) == 2
    index.clear()
    assert (index.match(prompt), index.num_blocks) == (0, 0)
