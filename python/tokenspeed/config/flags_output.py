# SPDX-License-Identifier: MIT
"""The engine's flags of what it gives out: streams, log lines, metrics, traces, events. Data only."""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_rows import flag as _flag

_API, _OUTPUT = "API Surface", "Observability"
OUTPUT_FLAGS: tuple[Flag, ...] = (
    _flag("--stream-interval", "int", 1, _API, "Tokens gathered before a stream hands them on."),
    _flag("--stream-output", "switch", False, _API, "AsyncLLM yields new text only, not the text so far."),
    _flag(
        "--input-logprob-chunk-tokens",
        "int",
        256,
        _API,
        "Tokens of a prompt whose logprobs are computed at a time: a row of logits each.",
    ),
    _flag(
        "--enable-nan-detection",
        "switch",
        False,
        _OUTPUT,
        "A request whose logits hold NaN ends with a numerical error, and num_nan_aborted_requests counts it.",
    ),
    _flag(
        "--enable-nvtx",
        "switch",
        False,
        _OUTPUT,
        "Mark steps and their parts (plan, launch, device, settle) as NVTX ranges for Nsight Systems. GPUs only.",
    ),
    _flag("--enable-output-logprobs", "switch", False, _API, "Logprobs for requests that ask. Always so here."),
    _flag(
        "--log-level",
        "str",
        "info",
        _OUTPUT,
        "Least severe line that is logged.",
        ("debug", "info", "warning", "warn", "error", "critical"),
    ),
    _flag("--enable-log-requests", "bool", True, _OUTPUT, "A line when a request ends."),
    _flag(
        "--log-requests-level",
        "int",
        0,
        _OUTPUT,
        "0: that it ended. 1: its parameters too. 2: its token ids too.",
        (0, 1, 2),
    ),
    _flag("--enable-log-request-stats", "bool", False, _OUTPUT, "Times and counts of the request in its line."),
    _flag("--decode-log-interval", "int", 40, _OUTPUT, "Decode steps between two lines of batch statistics; 0: none."),
    _flag(
        "--enable-metrics",
        "switch",
        False,
        _OUTPUT,
        "The engine serves its own /metrics, on --metrics-port or a free port that its log names. "
        "The gateway's /metrics is always there, and `ts serve` shows the engine's on its control port.",
    ),
    _flag("--metrics-port", "int", None, _OUTPUT, "Port of the engine's own /metrics; 0: a free one."),
    _flag("--metrics-host", "str", "127.0.0.1", _OUTPUT, "Address that the engine's /metrics listens on."),
    _flag("--enable-trace", "switch", False, _OUTPUT, "Send a span of every request to an OTLP collector."),
    _flag("--otlp-traces-endpoint", "str", "localhost:4317", _OUTPUT, "host:port of the collector (gRPC)."),
    _flag("--metrics-reporters", "append", ("prometheus",), _OUTPUT, "How metrics leave.", ("prometheus",)),
    _flag(
        "--kv-events-config",
        "str",
        None,
        _OUTPUT,
        "JSON: publish what changes in the prefix cache over ZMQ. Keys: enable_kv_cache_events, publisher (zmq), "
        "endpoint and replay_endpoint (bound; ports move up by --zmq-engine-index), topic, hwm, buffer_steps, "
        "max_queue_size.",
    ),
    _flag("--enable-cache-report", "switch", False, _OUTPUT, "Usage tells cached tokens. Always so here."),
    _flag("--app-key", "str", None, _OUTPUT, "Label app_key of the engine's metrics."),
)
