# SPDX-License-Identifier: MIT
"""KV events of a running engine as subscribers get them: SUB, replay, order, tiers, lost batches."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import tokenspeed_cc
from tests.support.processes import free_port, wait_until
from tokenspeed.config.flags import FlagError
from tokenspeed.config.kv_events import KvEventsConfig
from tokenspeed.engine.kv_feed import KvBatch, KvFeed
from tokenspeed.engine.kv_publisher import KvPublisher
from tokenspeed.engine.messages import Control
from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]

TOPIC = b"kv-events"
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


class Subscriber:
    """SUB and replay of one engine, and the batches that came."""

    def __init__(self, port: int, replay_port: int, topic: bytes = TOPIC) -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.sub.subscribe(topic)
        self.replayer = self._context.socket(zmq.DEALER)
        self.replayer.connect(f"tcp://127.0.0.1:{replay_port}")

    def batches(self, until: Callable[[list[Any]], bool]) -> list[tuple[int, Any]]:
        """(number, batch) as they come, until the events seen so far are enough."""
        seen: list[tuple[int, Any]] = []
        while not until([event for _, batch in seen for event in batch[1]]):
            assert self.sub.poll(10_000), seen
            topic, number, payload = self.sub.recv_multipart()
            assert topic == TOPIC and len(number) == 8
            seen.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
        return seen

    def wait_heard(self, publish: Callable[[], object]) -> None:
        """Publish until a batch comes: what is sent before a subscription has arrived, nobody gets."""

        def heard() -> bool:
            publish()
            return bool(self.sub.poll(50))

        wait_until(heard)

    def replay(self, start: int) -> list[tuple[int, Any]]:
        self.replayer.send(start.to_bytes(8, "big"))
        seen: list[tuple[int, Any]] = []
        while True:
            assert self.replayer.poll(10_000)
            number, payload = self.replayer.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return seen
            seen.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture
def subscriber(ports: tuple[int, int]) -> Iterator[Subscriber]:
    waiting = Subscriber(*ports)
    yield waiting
    waiting.close()


def config(ports: tuple[int, int], **changes: Any) -> str:
    values = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{ports[0]}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
        "topic": TOPIC.decode(),
    }
    return json.dumps(values | changes)


def flush(engine: Engine) -> None:
    done: list[bool] = []
    engine.frontend.replicas[0].deliver([Control("flush_cache", [], lambda success, _: done.append(success))])
    wait_until(lambda: bool(done))
    assert done == [True]


def after_flush(events: list[Any]) -> list[Any]:
    """What comes behind the flushes at the beginning."""
    return list(itertools.dropwhile(lambda event: event == ["AllBlocksCleared"], events))


def prompt(seed: int) -> list[int]:
    return [(seed * 31 + 7 * step) % 300 + 3 for step in range(70)]


def test_a_subscriber_sees_parents_before_children_removals_and_the_flush(
    start_engine: StartEngine, ports: tuple[int, int], subscriber: Subscriber
) -> None:
    engine = start_engine(kv_events_config=config(ports), max_total_tokens=256)
    begun = time.time()
    subscriber.wait_heard(lambda: flush(engine))
    for seed in range(4):
        engine.generate([prompt(seed)], GREEDY)
    wait_until(lambda: not engine.load().active_blocks)
    flush(engine)
    seen = subscriber.batches(lambda events: len(after_flush(events)) > 1 and events[-1] == ["AllBlocksCleared"])
    first = seen[0][0]
    assert [number for number, _ in seen] == list(range(first, first + len(seen)))
    assert all(begun <= batch[0] <= time.time() and batch[2] == 0 for _, batch in seen)
    events = after_flush([event for _, batch in seen for event in batch[1]])
    held: dict[int, list[int]] = {}
    for event in events[:-1]:
        if event[0] == "BlockStored":
            kind, [block_hash], parent, token_ids, block_size = event
            assert parent is None or parent in held
            assert len(token_ids) == block_size == 16 and -(2**63) <= block_hash < 2**63
            held[block_hash] = (held[parent] if parent is not None else []) + token_ids
        else:
            kind, [block_hash] = event
            assert kind == "BlockRemoved"
            del held[block_hash]
    assert any(event[0] == "BlockRemoved" for event in events)
    assert prompt(3)[:64] in held.values()
    assert [(n, b[1]) for n, b in subscriber.replay(first + 2)] == [(n, b[1]) for n, b in seen[2:]]
    assert subscriber.replay(first + len(seen)) == []


def test_a_short_buffer_replays_its_end_only_and_a_bad_request_is_dropped(
    start_engine: StartEngine, ports: tuple[int, int], subscriber: Subscriber
) -> None:
    engine = start_engine(kv_events_config=config(ports, buffer_steps=2))
    for seed in range(5):
        engine.generate([prompt(seed)], GREEDY)
    subscriber.replayer.send(b"what?")
    wait_until(lambda: [number for number, _ in subscriber.replay(0)] == [3, 4])


def test_a_rank_publishes_under_its_number_on_the_next_port(
    start_engine: StartEngine, ports: tuple[int, int], subscriber: Subscriber
) -> None:
    below = config((ports[0] - 1, ports[1] - 1))
    engine = start_engine(kv_events_config=below, zmq_engine_index=1)
    subscriber.wait_heard(lambda: flush(engine))
    assert subscriber.batches(bool)[0][1][2] == 1


def test_other_topics_are_not_delivered(start_engine: StartEngine, ports: tuple[int, int]) -> None:
    deaf, hearing = Subscriber(*ports, topic=b"else"), Subscriber(*ports)
    engine = start_engine(kv_events_config=config(ports))
    hearing.wait_heard(lambda: flush(engine))
    assert deaf.replay(0)  # it was published
    assert not deaf.sub.poll(100)
    for subscriber in (deaf, hearing):
        subscriber.close()


def test_a_taken_port_is_refused_by_name_and_the_port_is_free_after_shutdown(
    start_engine: StartEngine, ports: tuple[int, int]
) -> None:
    engine = start_engine(kv_events_config=config(ports))
    with pytest.raises(FlagError, match="--kv-events-config"):
        start_engine(kv_events_config=config(ports))
    with pytest.raises(FlagError, match="prefix caching"):
        start_engine(kv_events_config=config(ports), enable_prefix_caching=False)
    engine.shutdown()
    start_engine(kv_events_config=config(ports))


def scheduler_with_host() -> tokenspeed_cc.Scheduler:
    return tokenspeed_cc.Scheduler(
        tokenspeed_cc.SchedulerConfig(
            num_blocks=9,
            block_size=8,
            max_num_seqs=4,
            max_model_len=64,
            max_batched_tokens=32,
            chunked_prefill=True,
            overlap_depth=0,
            verify_width=1,
            max_decode_gap_tokens=32,
            enable_prefix_caching=True,
            eos_token_ids=[99],
            num_host_blocks=8,
        )
    )


def run_request(scheduler: tokenspeed_cc.Scheduler, request_id: int) -> None:
    spec = tokenspeed_cc.RequestSpec(
        request_id=request_id,
        token_ids=np.arange(20, dtype=np.int32) + request_id,
        max_new_tokens=2,
        min_new_tokens=0,
        stop_token_ids=[],
        ignore_eos=True,
        priority=0,
        cache_salt=0,
        adapter=0,
    )
    scheduler.submit(spec)
    while scheduler.has_work():
        plan = scheduler.plan()
        if plan is not None:
            rows = plan.num_rows
            scheduler.advance(plan.step_id, np.full((rows, 1), 5, np.int32), np.ones(rows, np.int32))
        for transfer in scheduler.transfers():
            scheduler.settle_transfer(transfer.transfer_id, True, -1)


def test_blocks_of_the_host_tier_say_where_they_are(ports: tuple[int, int], subscriber: Subscriber) -> None:
    scheduler = scheduler_with_host()
    settings = KvEventsConfig(
        True, "zmq", f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", topic="kv-events"
    )
    publisher, feed = KvPublisher(settings, 0, 8), KvFeed(scheduler, 8, 0)
    feed.enable()
    feed.subscribe(publisher.take)

    def clear() -> None:
        scheduler.flush_cache()
        feed.gather()

    subscriber.wait_heard(clear)
    for request_id in range(8):
        run_request(scheduler, request_id)
        feed.gather()
    publisher.close()
    enough = [["BlockRemoved", "CPU_TIER1"], ["BlockStored", "CPU_TIER1"], ["BlockRemoved"], ["BlockStored"]]

    def shapes(events: list[Any]) -> list[list[str]]:
        return [[event[0], *event[6:]] if event[0] == "BlockStored" else [event[0], *event[2:]] for event in events]

    seen = subscriber.batches(lambda events: all(shape in shapes(events) for shape in enough))
    events = after_flush([event for _, batch in seen for event in batch[1]])
    assert all(shape in enough for shape in shapes(events))
    device = {event[1][0] for event in events if len(event) == 5}
    assert all(event[1][0] in device for event in events if len(event) == 7)


def test_a_full_queue_loses_a_batch_and_its_number(ports: tuple[int, int]) -> None:
    scheduler = scheduler_with_host()
    publisher = KvPublisher(KvEventsConfig(True, "zmq", f"tcp://127.0.0.1:{ports[0]}", max_queue_size=1), 0, 8)
    feed = KvFeed(scheduler, 8, 0)
    feed.enable()
    feed.subscribe(publisher.take)
    publisher._queue.put(None)  # nobody takes anything out any more
    publisher._thread.join()
    kept = []
    for request_id in range(3):
        run_request(scheduler, request_id)
        feed.gather()
        if request_id != 1:
            batch = publisher._queue.get_nowait() if request_id else publisher._queue.queue[0]
            assert batch is not None
            kept.append(batch.sequence)
        if request_id == 1:
            publisher._queue.get_nowait()
    assert kept == [0, 2]
    publisher._context.destroy(linger=0)


def test_a_late_listener_gets_what_is_kept_and_then_every_batch() -> None:
    scheduler = scheduler_with_host()
    feed = KvFeed(scheduler, 8, 0)
    run_request(scheduler, 0)
    feed.gather()
    assert feed.subscribe(lambda batch: None) == []  # nothing is recorded before `enable`
    feed.enable()
    run_request(scheduler, 100)
    feed.gather()
    later: list[int] = []

    def listen(batch: KvBatch) -> None:
        later.append(batch.sequence)

    assert [batch.sequence for batch in feed.subscribe(listen)] == [0]
    run_request(scheduler, 200)
    feed.gather()
    feed.unsubscribe(listen)
    run_request(scheduler, 300)
    feed.gather()
    assert later == [1]
