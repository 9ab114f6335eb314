# SPDX-License-Identifier: MIT
"""The engine as `Engine` runs it where it is alone: its core in this process, its loop on a thread of its own."""

from __future__ import annotations

import traceback

from tokenspeed.config.hardware import Hardware
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_source import ModelSource
from tokenspeed.config.resolve import Config
from tokenspeed.engine.core import EngineCore, LoopThread, release_memory, set_frontend, start
from tokenspeed.engine.errors import EngineDeadError
from tokenspeed.engine.kv_feed import KvFeed
from tokenspeed.engine.local_frontend import LocalFrontend
from tokenspeed.engine.messages import LoadNumbers
from tokenspeed.engine.operations import Operations
from tokenspeed.engine.ports import EnginePorts


class OneReplica:
    """Serves from construction to `stop`. Raises what `start` raises."""

    def __init__(self, config: Config, source: ModelSource, model_config: ModelConfig, machine: Hardware) -> None:
        self.frontend = LocalFrontend()
        self._device = config.device
        try:
            core = start(config, source, model_config, machine, progress=lambda _: None)
        except BaseException as error:
            # Whoever keeps the error, as a notebook does, shall not keep the weights.
            traceback.clear_frames(error.__traceback__)
            release_memory(config.device)
            raise
        set_frontend(core, self.frontend)
        self._late_compiles = core.late_compiles
        self.core: EngineCore | None = core
        self._thread = LoopThread(core, self.frontend)

    def ask_to_stop(self) -> None:
        """The loop will end after the steps in flight."""
        self._thread.ask_to_stop()

    def stop(self) -> None:
        """End the loop and give its memory back; whoever waits gets EngineDeadError. May be called twice."""
        if self._thread.stop() and self.core is not None:
            self.core = None
            release_memory(self._device)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def operations(self) -> Operations:
        return self._running().operations

    @property
    def kv_log(self) -> KvFeed:
        return self._running().kv_feed

    def record_kv_events(self) -> None:
        core = self._running()
        core.operations.calls.call(core.kv_feed.enable)

    @property
    def ports(self) -> EnginePorts:
        return self._running().ports

    @property
    def num_blocks(self) -> int:
        return self._running().num_blocks - 1

    @property
    def late_compiles(self) -> int:
        return self._late_compiles.count

    def loads(self) -> list[LoadNumbers | None]:
        """Read beside the running loop, so approximate under load."""
        load = self._running().loop.scheduler.load()
        return [LoadNumbers(load.num_running, load.num_waiting, load.active_blocks, load.total_blocks)]

    def _running(self) -> EngineCore:
        if self.core is None:
            raise EngineDeadError("the engine has stopped")
        return self.core
