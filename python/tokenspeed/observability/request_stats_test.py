# SPDX-License-Identifier: MIT
"""The finish line to the letter, and where the numbers in it come from."""

from __future__ import annotations

from tokenspeed.observability.request_stats import RequestClock, finish_line

RECV = 1782255696.726


def test_the_line_is_the_one_that_tools_parse() -> None:
    clock = RequestClock(RECV)
    clock.scheduled(RECV + 0.0138)
    clock.prefilled(RECV + 0.0296)
    clock.emitted(RECV + 0.0421)
    stats = clock.stats("stop", prompt_tokens=28684, cache_tokens=832, output_tokens=33, now=RECV + 0.058)
    assert finish_line("chatcmpl-019ef6b7", stats) == (
        "Req: chatcmpl-019ef6b7 Finish! RequestStats(status='finished', reason='stop', prompt_tokens=28684, "
        "cache_tokens=832, output_tokens=33, cache_hit_rate=0.029, queue_ms=13.8, prefill_ms=15.8, ttft_ms=42.1, "
        "total_ms=58.0, preempt_ms=0.0, preempt_count=0, decode_tps=2012.6, acc_len=None, acc_rate=None, "
        "recv_ts=1782255696.726, commit_ts=1782255696.74, finish_ts=1782255696.784)"
    )


def test_a_request_aborted_in_the_queue_has_no_later_times() -> None:
    stats = RequestClock(100.0).stats("abort", prompt_tokens=10, cache_tokens=0, output_tokens=0, now=100.5)
    assert (stats.status, stats.reason, stats.total_ms) == ("aborted", "abort", 500.0)
    assert (stats.queue_ms, stats.prefill_ms, stats.ttft_ms, stats.commit_ts, stats.decode_tps) == (None,) * 5


def test_only_the_first_of_each_point_counts() -> None:
    clock = RequestClock(0.0)
    for now in (1.0, 2.0):
        clock.scheduled(now)
        clock.prefilled(now + 0.25)
        clock.emitted(now + 0.5)
    stats = clock.stats("length", prompt_tokens=1, cache_tokens=0, output_tokens=1, now=4.0)
    assert (stats.queue_ms, stats.prefill_ms, stats.ttft_ms) == (1000.0, 250.0, 1500.0)


def test_interruptions_count_rising_edges_and_their_whole_length() -> None:
    clock = RequestClock(0.0)
    for delayed, now in ((False, 1.0), (True, 2.0), (True, 2.5), (False, 3.0), (True, 4.0)):
        clock.decode_delayed(delayed, now)
    stats = clock.stats("stop", prompt_tokens=1, cache_tokens=0, output_tokens=2, now=4.5)
    assert stats.preempt_count == 2
    assert stats.preempt_ms == 1500.0  # the second one lasted until the end


def test_acceptance_counts_the_target_models_own_token() -> None:
    clock = RequestClock(0.0)
    clock.drafted(num_tokens=3, num_accepted=3)
    clock.drafted(num_tokens=3, num_accepted=0)
    stats = clock.stats("stop", prompt_tokens=1, cache_tokens=0, output_tokens=5, now=1.0)
    assert (stats.acc_len, stats.acc_rate) == (2.5, 0.5)
