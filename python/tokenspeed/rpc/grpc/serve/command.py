# SPDX-License-Identifier: MIT
"""The command line of the gRPC server: the engine's flags, and where to listen."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import grpc

from tokenspeed.config.flags import FlagError, ParsedFlags, parse_flags
from tokenspeed.config.flags_help import server_help
from tokenspeed.config.flags_table import ENGINE_FLAGS, SERVER_FLAGS
from tokenspeed.config.flags_yaml import without_yaml, words_of_yaml
from tokenspeed.config.model_error import ModelError
from tokenspeed.rpc.grpc.limits import LimitError, max_message_bytes, server_options

USAGE = 2


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 after a signal, 1 when the engine failed, 2 when the command line or the model is wrong."""
    if "--help" in argv or "-h" in argv:
        print("usage: python3 -m tokenspeed.rpc.grpc [MODEL] [flags]\n")
        print(server_help(SERVER_FLAGS + ENGINE_FLAGS))
        return 0
    try:
        return _serve(argv)
    except ValueError as error:
        # OutOfMemory is the engine's, which is not loaded for a wrong flag.
        if not isinstance(error, (FlagError, ModelError, LimitError)) and type(error).__name__ != "OutOfMemory":
            raise
        print(f"tokenspeed.rpc.grpc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE


def _parsed(argv: Sequence[str]) -> ParsedFlags:
    table = SERVER_FLAGS + ENGINE_FLAGS
    parsed = parse_flags(argv, table)
    path = parsed.values["ext_yaml"]
    if path is None:
        return parsed
    return parse_flags([*words_of_yaml(path, table, parsed.given), *without_yaml(argv)], table)


def _serve(argv: Sequence[str]) -> int:
    server = _parsed(argv)
    if server.rest:
        raise FlagError(server.rest[0], "no such flag (see --help)")
    values = {name: server.values[name] for name in server.given}
    host, port, drain_s = (server.values[name] for name in ("host", "port", "drain_timeout"))
    if not 0 <= port <= 65535:
        raise FlagError("--port", f"{port} is not in [0, 65535]")
    if server.values["skip_tokenizer_init"]:
        raise FlagError("--skip-tokenizer-init", "gateways ask this server for its tokenizer")
    server_options(max_message_bytes())  # a bad limit is found before a model is loaded
    for flag in SERVER_FLAGS:
        values.pop(flag.dest, None)
    logging.basicConfig(
        level=server.values["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    # Loaded here: a wrong flag is answered without torch.
    if server.values["node_rank"]:
        from tokenspeed.rpc.grpc.serve.other_node import run_other_node

        return run_other_node(values, host, port)
    from tokenspeed.engine.offline import Engine
    from tokenspeed.rpc.grpc.serve.server import serve

    with Engine(**values) as engine:
        if engine.config.scheduler.enable_prefix_caching:
            engine.record_kv_events()
        try:
            return asyncio.run(serve(engine, host, port, drain_s, server.values["reasoning_parser"]))
        except grpc.aio.AioRpcError as error:
            print(f"tokenspeed.rpc.grpc: error: no token came at start: {error.details()}", file=sys.stderr)
            return 1
