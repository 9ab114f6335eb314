# SPDX-License-Identifier: MIT
"""Batch lines to the letter, and when the decode line is due."""

from __future__ import annotations

import pytest

from tokenspeed.observability.log_lines import Blocks, DecodeBatch, DecodeMeter, PrefillBatch


def prefill(num_decode: int) -> PrefillBatch:
    return PrefillBatch(
        dp_rank=0,
        num_new_seqs=2,
        num_new_tokens=512,
        num_cached_tokens=64,
        num_decode=num_decode,
        num_running=3,
        num_queued=1,
    )


def test_prefill_and_mixed_batches_differ_in_their_first_word() -> None:
    rest = " batch. #dp-rank: 0, #new-seq: 2, #new-token: 512, #cached-token: 64, #running-req: 3, #queue-req: 1"
    assert prefill(num_decode=0).line() == "Prefill" + rest
    assert prefill(num_decode=1).line() == "Mix" + rest


def decode(accept_len: float | None, accept_rate: float | None, total: int = 200) -> str:
    return DecodeBatch(1, 4, 123.44, Blocks(50, 25, total), 99.999, accept_len, accept_rate, 7).line()


def test_decode_line_without_speculation() -> None:
    assert decode(None, None) == (
        "Decode batch. #dp-rank: 1, #running-req: 4, avg_seq_len: 123.4, #pages(active/cached/total): 50/25/200, "
        "page ratio: 0.25, gen throughput (token/s): 100.00, #queue-req: 7"
    )


def test_decode_line_with_speculation() -> None:
    assert decode(2.5, 0.75).endswith(
        "gen throughput (token/s): 100.00, avg_accept_len: 2.50, accept_rate: 0.75, #queue-req: 7"
    )


def test_an_empty_pool_has_no_ratio() -> None:
    assert "page ratio: 0.00" in decode(None, None, total=0)


def test_a_line_is_due_every_interval_with_the_rate_since_the_last() -> None:
    meter = DecodeMeter(interval_steps=4)
    meter.launched(-1.0)
    assert [meter.settled(8, float(now)) for now in range(8)] == [None, None, None, 8.0, None, None, None, 8.0]


def test_a_pause_does_not_lower_the_rate_and_steps_count_on_behind_it() -> None:
    meter = DecodeMeter(interval_steps=2)
    meter.launched(0.0)
    assert meter.settled(8, 1.0) is None
    meter.idle()
    meter.launched(100.0)
    assert meter.settled(8, 101.0) == 8.0


def test_no_time_no_rate_and_no_interval_no_meter() -> None:
    assert DecodeMeter(interval_steps=1).settled(8, 0.0) == 0.0
    with pytest.raises(ValueError, match="decode_log_interval"):
        DecodeMeter(interval_steps=0)
