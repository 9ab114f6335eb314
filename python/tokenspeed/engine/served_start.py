# SPDX-License-Identifier: MIT
"""Starting an engine from `ServerArgs`, for programs that serve it themselves."""

from __future__ import annotations

import atexit
import logging
from typing import Any

from tokenspeed.config import hardware
from tokenspeed.config.flags import values_from_kwargs
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.flags_yaml import keywords_with_yaml
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import resolve_model
from tokenspeed.config.resolve import resolve
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.served_llm import ServedLLM


class ServedEngine:
    """An engine in this process. `tokenizer_manager` is what drives it; `scheduler_info` its limits, in tokens.

    What was left open in `server_args` is filled in. Raises what `Engine` raises.
    """

    def __init__(self, server_args: Any) -> None:
        self._engine = Engine(**server_args.engine_options())
        self.tokenizer_manager = ServedLLM(self._engine, server_args)
        limits = self._engine.config.scheduler
        num_tokens = self._engine.num_blocks * limits.block_size
        self.scheduler_info = {
            "max_total_num_tokens": num_tokens,
            "max_model_len": limits.max_model_len,
            "max_req_input_len": limits.max_model_len - 1,
            "chunked_prefill_size": limits.max_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
        }
        _fill_in(server_args, self._engine, num_tokens)
        # The loop's thread must have ended before the interpreter does.
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """May be called twice."""
        atexit.unregister(self.shutdown)
        self._engine.shutdown()


def launch(server_args: Any, port_args: Any = None) -> tuple[ServedLLM, None, dict[str, int]]:
    """The engine's driver, no templates (they are the gateway's), its limits. port_args: this engine has no ports
    between its parts."""
    engine = ServedEngine(server_args)
    return engine.tokenizer_manager, None, engine.scheduler_info


def launch_headless(server_args: Any) -> int:
    """An engine that dials a gateway, in this process until a signal; the exit status."""
    from tokenspeed.engine.headless import run_headless

    values = values_from_kwargs(keywords_with_yaml(server_args.engine_options(), ENGINE_FLAGS), ENGINE_FLAGS).values
    source = resolve_model(values["model"], revision=values["revision"], download_dir=values["download_dir"])
    model_config = load_model_config(source)
    machine = hardware.detect()
    config = resolve(values, machine, model_config)
    logging.basicConfig(level=config.log.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    return run_headless(config, source, model_config, machine, values["served_model_name"] or source.name)


def _fill_in(server_args: Any, engine: Engine, num_tokens: int) -> None:
    limits = engine.config.scheduler
    server_args.model = server_args.model or str(engine.source.path)
    server_args.tokenizer = server_args.tokenizer or server_args.model
    server_args.served_model_name = server_args.served_model_name or engine.source.name
    server_args.max_num_seqs = limits.max_num_seqs
    server_args.max_model_len = limits.max_model_len
    server_args.max_total_num_tokens = num_tokens
    server_args.chunked_prefill_size = limits.max_batched_tokens
