# SPDX-License-Identifier: MIT
"""`ts serve`: splits the command line, checks all of it, then runs an engine and a gateway, or an engine alone.

Everything that can be wrong with flags and model is found here, before a process starts, and reported in one line.
No torch in the supervisor: it parses, resolves the model (downloading it with progress) and watches its children.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed.cli import _proc
from tokenspeed.cli.replicas import Replicas
from tokenspeed.cli.supervisor import Supervisor, SupervisorConfig
from tokenspeed.config import hardware
from tokenspeed.config.flags import FlagError, ParsedFlags, json_object, parse_flags
from tokenspeed.config.flags_help import on_page, server_help
from tokenspeed.config.flags_table import ENGINE_FLAGS, SUPERVISOR_FLAGS
from tokenspeed.config.flags_yaml import without_yaml, words_of_yaml
from tokenspeed.config.gateway import TABLE as GATEWAY_FLAGS
from tokenspeed.config.gateway import GatewayConfig, parse_launch
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import ModelSource, resolve_model
from tokenspeed.config.resolve import resolve
from tokenspeed.config.slurm import with_slurm

DEFAULT_PORT = 8000
_SUPERVISED_ONLY = (
    "engine_startup_timeout",
    "gateway_startup_timeout",
    "drain_timeout",
    "engine_restarts",
    "control_port",
    "log_level_http",
)
_LANE_FLAGS = (
    "data_parallel_address",
    "data_parallel_rpc_port",
    "zmq_engine_index",
    "zmq_curve_secret_key_file",
    "zmq_curve_server_key",
)
_OWN_NAMES = {name for flag in ENGINE_FLAGS + SUPERVISOR_FLAGS for name in flag.spellings}
SUPERVISED_GATEWAY_FLAGS = tuple(
    replace(flag, default=DEFAULT_PORT) if flag.name == "--port" else flag
    for flag in GATEWAY_FLAGS
    if flag.name not in _OWN_NAMES
)
"""The gateway's flags that a command line of `ts serve` may hold, with their defaults here."""
# Words of the gateway's own table that an engine's flag of the same name does not keep from it.
_GATEWAY_ONLY = {name for flag in GATEWAY_FLAGS for name in flag.spellings} - _OWN_NAMES
_LOG_LEVELS = {"warning": "warn", "critical": "error"}
"""What the gateway calls them."""


@dataclass(frozen=True)
class Split:
    """A command line taken apart. `engine_words`: the engine's flags as written, without the model."""

    supervisor: ParsedFlags
    engine: ParsedFlags
    engine_words: list[str]
    gateway_words: list[str]


def main(argv: Sequence[str]) -> int:
    """Exit status. Raises FlagError and ModelError for what the user got wrong."""
    if "--help" in argv or "-h" in argv:
        print("usage: ts serve [MODEL] [flags]\n\nOther flags go to the gateway: see `smg launch --help`.\n")
        print(server_help((*ENGINE_FLAGS, *on_page(SUPERVISED_GATEWAY_FLAGS), *SUPERVISOR_FLAGS)))
        return 0
    split = with_yaml(argv)
    values = with_slurm(split.engine.values, os.environ, len(hardware.detect().usable_gpus))
    split = replace(split, engine=replace(split.engine, values=values))
    if split.supervisor.values["headless"]:
        return _headless(split)
    if split.engine.values["node_rank"]:
        return _headless(_engine_alone(split))  # the first machine has the gateway
    return _supervised(split)


def with_yaml(argv: Sequence[str]) -> Split:
    """The command line taken apart, with the flags of its --ext-yaml where it does not say them itself."""
    split = split_argv(argv)
    path = split.engine.values["ext_yaml"]
    if path is None:
        return split
    words = {word.partition("=")[0] for word in split.gateway_words}
    table = (*SUPERVISOR_FLAGS, *ENGINE_FLAGS, *SUPERVISED_GATEWAY_FLAGS)
    given = {flag.dest for flag in SUPERVISED_GATEWAY_FLAGS if words & set(flag.spellings)}
    of_file = words_of_yaml(path, table, given | set(split.engine.given) | set(split.supervisor.given))
    # Last: a list of numbers takes every word that follows.
    return split_argv([*without_yaml(argv), *of_file])


def split_argv(argv: Sequence[str]) -> Split:
    """Whose flag is whose: the supervisor's and the engine's by their tables, everything else the gateway's."""
    gateway_words, others = _take(argv, _GATEWAY_ONLY)
    names = {name for flag in SUPERVISOR_FLAGS for name in flag.spellings}
    ours, others = _take(others, names)
    supervisor = parse_flags(ours, SUPERVISOR_FLAGS)
    engine = parse_flags(others, ENGINE_FLAGS)
    gateway_words += engine.rest
    engine_words = _without(others, engine)
    return Split(supervisor, engine, engine_words, gateway_words)


def _take(argv: Sequence[str], names: set[str]) -> tuple[list[str], list[str]]:
    """(words of flags in `names` with their operands, the rest)."""
    taken: list[str] = []
    rest: list[str] = []
    current = rest
    arity = {name: _operands(name) for name in names}
    left = 0.0
    for word in argv:
        name = word.partition("=")[0]
        if word.startswith("--"):
            current = taken if name in names else rest
            left = 0 if "=" in word or current is rest else arity[name]
        elif current is taken:
            if left <= 0:
                current = rest
            left -= 1
        current.append(word)
    return taken, rest


def _operands(name: str) -> float:
    """How many words may follow a flag of the gateway or the supervisor."""
    for flag in (*SUPERVISOR_FLAGS, *GATEWAY_FLAGS):
        if name in flag.spellings:
            if not flag.takes_value:
                return 0
            return float("inf") if name == "--worker-urls" else 1
    return 0


def _without(words: list[str], engine: ParsedFlags) -> list[str]:
    """The engine's words without the model (it is passed on as resolved) and without what is not the engine's."""
    kept, _ = _take_known(words, engine.rest)
    return kept


def _take_known(words: list[str], rest: list[str]) -> tuple[list[str], list[str]]:
    model_names = ("--model", "--model-path")
    table = {name: flag for flag in ENGINE_FLAGS for name in flag.spellings}
    kept: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        flag = table.get(word.partition("=")[0])
        index += 1
        if flag is None:
            continue  # the model as a lone word, or the gateway's, which `rest` has
        piece = [word]
        if flag.takes_value and "=" not in word:
            many = flag.kind == "ints"
            while index < len(words) and not words[index].startswith("--") and (many or len(piece) < 2):
                piece.append(words[index])
                index += 1
        if flag.names[0] not in model_names:
            kept += piece
    return kept, rest


def _engine_alone(split: Split) -> Split:
    """A machine of other ranks may be given the flags of the first one: those for gateway and supervisor say nothing
    here."""
    return replace(split, supervisor=parse_flags(["--headless"], SUPERVISOR_FLAGS), gateway_words=[])


def _headless(split: Split) -> int:
    for dest in _SUPERVISED_ONLY:
        if dest in split.supervisor.given:
            raise FlagError(
                split.supervisor.given[dest], "is for a supervised server; --headless starts an engine alone"
            )
    for word in split.gateway_words:
        name = word.partition("=")[0]
        if name in _GATEWAY_ONLY:
            raise FlagError(name, "is the gateway's: an engine alone serves no HTTP clients; give it to `smg launch`")
        raise FlagError(word, "no such flag of an engine (see `ts serve --help`)")
    values = split.engine.values
    source = _resolve_source(values)
    model_config = load_model_config(source, json_object(values, "hf_overrides"))
    machine = hardware.detect()
    config = resolve(values, machine, model_config)
    if config.parallel.data_rank is None:
        return Replicas(headless_arguments(split, source), config.parallel.data_size).run()
    logging.basicConfig(level=config.log.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    if config.parallel.node_rank:
        from tokenspeed.engine.nodes import Node

        return Node(config, source, model_config).run()
    from tokenspeed.engine.headless import run_headless

    return run_headless(config, source, model_config, machine, values["served_model_name"] or source.name)


def _supervised(split: Split) -> int:
    values = split.engine.values
    for dest in _LANE_FLAGS:
        if dest in split.engine.given:
            raise FlagError(split.engine.given[dest], "is for --headless; here the supervisor makes the lane")
    if values["skip_tokenizer_init"]:
        raise FlagError("--skip-tokenizer-init", "the gateway needs the tokenizer; offline engines can do without")
    worker_url = _proc.fresh_worker_url()
    gateway_words = gateway_arguments(split, worker_url)
    # Everything that can be refused is refused now, while there is one line of output and no process.
    parse_launch([*gateway_words, "--model-path", "."])
    source = _resolve_source(values)
    model_config = load_model_config(source, json_object(values, "hf_overrides"))
    parallel = resolve(values, hardware.detect(), model_config).parallel
    if "data_parallel_rank" in split.engine.given:
        raise FlagError("--data-parallel-rank", "is for --headless; here all replicas are started")
    gateway_words += ["--model-path", str(source.path)]
    tokenizer = values["tokenizer"]
    if tokenizer is not None:
        gateway_words += ["--tokenizer-path", str(resolve_model(tokenizer).path)]
    # One port for every start of the engine, so that its callers find it again. The user's own, or one of ours.
    engine_port = values["rl_control_port"] or _proc.free_port(parallel.data_size)
    supervisor = Supervisor(
        supervisor_config(split, parse_launch(gateway_words), range(engine_port, engine_port + parallel.data_size)),
        engine_arguments=engine_arguments(split, source, worker_url, engine_port),
        gateway_arguments=["-m", "tokenspeed.cli.smg", "launch", *gateway_words],
        out=sys.stderr,
    )
    return supervisor.run()


def _resolve_source(values: dict[str, Any]) -> ModelSource:
    return resolve_model(values["model"], revision=values["revision"], download_dir=values["download_dir"])


def engine_arguments(split: Split, source: ModelSource, worker_url: str, engine_port: int) -> list[str]:
    """What the engine's process is started with: the user's flags, the resolved model, its lane."""
    return [
        *headless_arguments(split, source),
        "--data-parallel-rpc-port",
        str(_proc.zmq_handshake_port(worker_url)),
        "--rl-control-port",
        str(engine_port),
    ]


def headless_arguments(split: Split, source: ModelSource) -> list[str]:
    """An engine alone, with the user's flags and the resolved model."""
    return [
        "-m",
        "tokenspeed.cli.ts",
        "serve",
        "--headless",
        "--model",
        str(source.path),
        *([] if "served_model_name" in split.engine.given else ["--served-model-name", source.name]),
        *split.engine_words,
    ]


def gateway_arguments(split: Split, worker_url: str) -> list[str]:
    """The user's gateway flags behind the supervisor's defaults; a default gives way to what the user said."""
    words = list(split.gateway_words)
    http_level = split.supervisor.values["log_level_http"] or "warn"
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    defaults = {
        "--port": str(DEFAULT_PORT),
        "--log-level": _LOG_LEVELS.get(http_level, http_level),
        "--shutdown-grace-period-secs": str(split.supervisor.values["drain_timeout"]),
    }
    for name, value in defaults.items():
        if name not in given:
            words += [name, value]
    if split.engine.values["enable_trace"]:
        words += ["--enable-trace", "--otlp-traces-endpoint", split.engine.values["otlp_traces_endpoint"]]
    preferred = split.engine.values["preferred_sampling_params"]
    if preferred is not None:
        words += ["--preferred-sampling-params", preferred]
    if "--disable-retries" not in given:
        words.append("--disable-retries")  # one engine: there is nobody else to try
    known = {name for flag in SUPERVISED_GATEWAY_FLAGS for name in flag.spellings}
    for name in given - known:
        raise FlagError(name, "no such flag (see `ts serve --help` and `smg launch --help`)")
    if "--worker-urls" in given:
        raise FlagError("--worker-urls", "is for `smg launch`; here the supervisor makes the lane")
    return [*words, "--backend", "tokenspeed", "--worker-urls", worker_url]


def supervisor_config(split: Split, gateway: GatewayConfig, engine_ports: Sequence[int]) -> SupervisorConfig:
    values = split.supervisor.values
    for dest in ("engine_startup_timeout", "gateway_startup_timeout", "drain_timeout"):
        if not 0 < values[dest] < 1e9:
            raise FlagError("--" + dest.replace("_", "-"), f"{values[dest]} is not a number of seconds")
    if values["engine_restarts"] < 0:
        raise FlagError("--engine-restarts", f"must not be negative, got {values['engine_restarts']}")
    control_port = values["control_port"]
    if control_port is None and 0 < gateway.port < 65535:
        control_port = gateway.port + 1
    if control_port is not None and not 0 < control_port < 65536:
        raise FlagError("--control-port", f"{control_port} is not a port")
    return SupervisorConfig(
        host=gateway.host,
        port=gateway.port,
        tls=gateway.tls_cert is not None,
        engine_startup_timeout_s=values["engine_startup_timeout"],
        gateway_startup_timeout_s=values["gateway_startup_timeout"],
        drain_timeout_s=values["drain_timeout"],
        max_restarts=values["engine_restarts"],
        engine_urls=tuple(
            f"http://{_reachable(split.engine.values['rl_control_host'])}:{port}" for port in engine_ports
        ),
        control_port=control_port,
        control_is_asked="control_port" in split.supervisor.given,
        control_key=split.engine.values["rl_control_api_key"],
        gateway_key=next(iter(gateway.api_keys), None),
        server_args={
            name: value
            for name, value in (split.engine.values | split.supervisor.values).items()
            if name != "rl_control_api_key"
        },
    )


def _reachable(host: str) -> str:
    """Where this machine finds what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host
