# SPDX-License-Identifier: MIT
"""Flags of `smg launch`: each known flag is honoured or refused by name, and nothing else is let through."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tokenspeed.config.flags import Flag, FlagError
from tokenspeed.config.gateway import HONOURED, TABLE, BreakerConfig, launch_help, parse_launch
from tokenspeed.config.gateway_refused import REFUSED

WORKER = ["--worker-urls", "ipc:///run/w0"]


def test_defaults_are_those_of_the_released_gateway_where_it_has_them() -> None:
    config = parse_launch(WORKER)
    assert (config.host, config.port, config.worker_urls) == ("0.0.0.0", 30000, ("ipc:///run/w0",))
    assert (config.retry.max_attempts, config.retry.initial_backoff_s, config.retry.jitter) == (5, 0.05, 0.2)
    assert (config.limits.max_payload_bytes, config.limits.queue_size) == (512 << 20, 100)
    assert config.limits.max_concurrent_requests >= 4096
    assert config.breaker == BreakerConfig(failures=10, window_s=120, open_s=60, successes=3)
    assert (config.drain.grace_s, config.sse_keepalive_s) == (180, 15)
    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "words",
    [
        ["--worker-urls", "ipc:///a", "tcp://h:1", "--port", "1"],
        ["--worker-urls", "ipc:///a", "--worker-urls=tcp://h:1", "--port=1"],
        ["--port", "1", "--worker-urls", "ipc:///a", "--worker-urls", "tcp://h:1"],
    ],
)
def test_several_workers_may_follow_one_flag_or_several(words: list[str]) -> None:
    config = parse_launch(words)
    assert (config.worker_urls, config.port) == (("ipc:///a", "tcp://h:1"), 1)


def test_what_ts_serve_passes_is_taken() -> None:
    words = ["--backend", "tokenspeed", "--disable-retries", "--disable-circuit-breaker", "--disable-load-monitoring"]
    words += ["--reasoning-parser", "passthrough", "--log-level", "warn", "--policy", "passthrough"]
    config = parse_launch([*WORKER, *words])
    assert config.breaker.failures == 0
    assert (config.retry.max_attempts, config.routing.policy, config.logs.level) == (1, "passthrough", "warn")


# Bare switches that ask for what happens anyway are let through.
REFUSABLE = [flag for flag in REFUSED if flag.takes_value or True not in flag.accepts]


@pytest.mark.parametrize("flag", REFUSABLE, ids=lambda flag: flag.name)
def test_a_refused_flag_is_refused_by_name_with_a_reason(flag: Flag) -> None:
    value = {"int": ["12345"], "float": ["12345"], "switch": [], "bool": []}.get(flag.kind, ["something-else"])
    with pytest.raises(FlagError, match=f"^{flag.name}: refused: .{{10}}"):
        parse_launch([*WORKER, flag.name, *value])


@pytest.mark.parametrize("flag", [f for f in REFUSED if f.takes_value and f.accepts and f.accepts[0] != ()], ids=str)
def test_a_refused_flag_passes_with_the_value_that_asks_for_nothing(flag: Flag) -> None:
    assert parse_launch([*WORKER, flag.name, str(flag.accepts[0])]) == parse_launch(WORKER)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-flag"], "--no-such-flag: no such flag"),
        (["--port", "x"], "--port: 'x' is not an integer"),
        (["--port", "70000"], "--port: must be in"),
        (["--policy", "luck"], "--policy: 'luck' is not one of random, round_robin, passthrough, cache_aware"),
        (["--cb-failure-threshold", "0"], "--cb-failure-threshold: must be in"),
        (["--cache-threshold", "1.5"], "--cache-threshold: must be in"),
        (["--assignment-mode", "delegate"], "--assignment-mode: 'delegate' is not one of random, min_load, min_group"),
        (["--backend", "vllm"], "--backend: 'vllm' is not one of"),
        (["--retry-jitter-factor", "2"], "--retry-jitter-factor: must be in"),
        (["--tls-cert-path", "c.pem"], "--tls-cert-path: the certificate and its key"),
        (["--api-key-file", "/no/such/file"], "--api-key-file: /no/such/file cannot be read"),
        (["--prometheus-duration-buckets", "1", "soon"], "--prometheus-duration-buckets: .* are not numbers"),
    ],
)
def test_a_bad_flag_is_named(words: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        parse_launch([*WORKER, *words])


def test_a_gateway_without_workers_and_a_lone_word_are_refused() -> None:
    with pytest.raises(FlagError, match="--worker-urls: at least one"):
        parse_launch([])
    with pytest.raises(FlagError, match="unexpected word"):
        parse_launch(["some-model", *WORKER])


def test_keys_come_from_flags_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k2\n\n k3 \n")
    config = parse_launch([*WORKER, "--api-key", "k1", "--api-key-file", str(file)])
    assert config.api_keys == ("k1", "k2", "k3")


def test_no_flag_stands_in_the_table_twice_and_help_lists_the_honoured_ones() -> None:
    names = [name for flag in TABLE for name in flag.names]
    assert len(names) == len(set(names))
    assert all(flag.name in launch_help() for flag in HONOURED)
    assert "--enable-mesh" not in launch_help()


def test_the_address_of_redis_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "redis"
    file.write_text("redis://:secret@host/0\n")
    config = parse_launch([*WORKER, "--history-backend", "redis", "--redis-url-file", str(file)])
    assert config.history.redis_url == "redis://:secret@host/0"
    with pytest.raises(FlagError, match="--redis-url-file: it excludes"):
        parse_launch([*WORKER, "--redis-url", "redis://a", "--redis-url-file", str(file)])
    with pytest.raises(FlagError, match=r"--redis-url-file: .* cannot be read"):
        parse_launch([*WORKER, "--redis-url-file", str(tmp_path / "none")])


def test_memory_has_its_own_retention_and_traces_and_caches_are_off_unless_asked_for() -> None:
    config = parse_launch([*WORKER, "--history-backend", "memory"])
    assert (config.history.retention_s, config.history.memory_responses) == (86400, 10000)
    assert config.traces.endpoint is None
    assert (config.tokenizer_cache.exact_bytes, config.tokenizer_cache.prefix_bytes) == (0, 0)
    assert parse_launch([*WORKER, "--enable-trace"]).traces.endpoint == "localhost:4317"
    for words, flag in (
        (["--cors-allowed-origins", "example.org"], "--cors-allowed-origins"),
        (["--enable-trace", "--otlp-traces-endpoint", "nowhere"], "--otlp-traces-endpoint"),
        (["--max-connections", "-1"], "--max-connections"),
    ):
        with pytest.raises(FlagError, match=flag):
            parse_launch([*WORKER, *words])
