# SPDX-License-Identifier: MIT
"""One of an `Engine`'s replicas: a process of its own (`python -m tokenspeed.engine.replica SOCKET RANK`).

Its main thread builds the engine of its `Setup` and runs the loop. `reads` takes what its parent sends and ends this
process when the parent is gone, whatever the main thread waits for; `writes` sends; a call has a thread of its own,
since it may wait for requests that run. It opens no port but that of its KV events; others reach it through its parent.
"""

from __future__ import annotations

import logging
import operator
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tokenspeed.config import hardware
from tokenspeed.config.flags import json_object
from tokenspeed.config.model import load_model_config
from tokenspeed.config.model_source import resolve_model
from tokenspeed.config.resolve import resolve
from tokenspeed.engine.core import EngineCore, set_frontend, start
from tokenspeed.engine.errors import START_ERRORS
from tokenspeed.engine.kv_feed import KvBatch
from tokenspeed.engine.leader import Leader
from tokenspeed.engine.local_frontend import LocalFrontend
from tokenspeed.engine.messages import StepOutput
from tokenspeed.engine.processes import end_now
from tokenspeed.engine.replica_link import Call, Failed, KvChanges, Ready, ReplicaState, Returned, Setup

logger = logging.getLogger("tokenspeed.engine")

NO_PORTS = {"rl_control_port": None, "metrics_port": None, "enable_metrics": False}


class Link:
    """This end of the pair of sockets. The first message is read by whoever makes it, the rest by its thread."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.frontend = LinkFrontend(self)
        self.stopping = False
        self.on_call: Callable[[Call], None] = lambda call: None
        """Who answers calls; set before `Ready` is sent."""
        self._connection = connection
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.setup: Setup = connection.recv()
        self._writer = threading.Thread(target=self._write, name="writes", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="reads", daemon=True).start()

    def send(self, message: Any) -> None:
        """Any thread; never waits."""
        self._outgoing.put(message)

    def flush(self) -> None:
        """Wait until everything is sent; nothing is sent any more."""
        self._outgoing.put(None)
        self._writer.join()

    def _read(self) -> None:
        try:
            while (message := self._connection.recv()) is not None:
                if isinstance(message, Call):
                    threading.Thread(target=self.on_call, args=(message,), daemon=True).start()
                else:
                    self.frontend.deliver(message)
        except (EOFError, OSError):
            os._exit(1)
        self.stopping = True
        self.frontend.deliver([])

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(1)


class LinkFrontend(LocalFrontend):
    """The loop's frontend: commands come from the link, results go there whole."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def publish(self, output: StepOutput) -> None:
        self._link.send(output)


class Desk:
    """Answers calls, and tells what has changed when a turn is over."""

    def __init__(self, core: EngineCore, link: Link) -> None:
        self._core = core
        self._link = link
        self._told: ReplicaState | None = None
        self._after_turn = core.loop.after_turn
        core.loop.after_turn = self._turned
        self._own: dict[str, Callable[..., Any]] = {
            "record_kv_events": self._record_kv_events,
            "metrics": core.metrics.render,
        }

    @property
    def state(self) -> ReplicaState:
        operations = self._core.operations
        return ReplicaState(
            operations.weight_version,
            operations.model_path,
            operations.is_paused,
            operations.updates.collects,
            tuple(sorted(operations.asleep)),
            self._core.late_compiles.count,
        )

    def answer(self, call: Call) -> None:
        value, failure = None, None
        try:
            run = self._own.get(call.name) or operator.attrgetter(call.name)(self._core.operations)
            value = run(*call.arguments)
        except Exception as error:  # noqa: BLE001  (the caller's, as if it had called the method itself)
            failure = (type(error).__name__, str(error), getattr(error, "status", 0))
        self._link.send(Returned(call.number, value, failure, self.state))

    def _turned(self) -> None:
        self._after_turn()
        state = self.state
        if state != self._told:
            self._told = state
            self._link.send(state)

    def _record_kv_events(self) -> None:
        feed = self._core.kv_feed

        def begin() -> None:
            feed.subscribe(self._tell_changes)
            feed.enable()

        self._core.operations.calls.call(begin)

    def _tell_changes(self, batch: KvBatch) -> None:
        self._link.send(KvChanges(batch.timestamp_s, batch.changes))


def run(link: Link) -> None:
    """Serve until told to stop. Raises what `start` raises, and whatever kills the loop."""
    setup = link.setup
    flags = {**setup.flags, **NO_PORTS, "data_parallel_rank": setup.data_rank}
    source = resolve_model(flags["model"], revision=flags["revision"], download_dir=flags["download_dir"])
    model_config = load_model_config(source, json_object(flags, "hf_overrides"))
    machine = hardware.detect()
    config = resolve(flags, machine, model_config)
    logging.basicConfig(
        level=config.log.log_level.upper(), format=f"%(asctime)s %(levelname)s replica {setup.data_rank}: %(message)s"
    )
    core = start(config, source, model_config, machine, progress=lambda _: None)
    if isinstance(core.ranks, Leader):
        core.ranks.on_loss = end_now
    set_frontend(core, link.frontend)
    desk = Desk(core, link)
    link.on_call = desk.answer
    link.send(Ready(core.num_blocks - 1, desk.state))
    try:
        core.loop.run(lambda: link.stopping)
    except Exception as error:
        raise core.ranks.cause(error) from error
    finally:
        core.close()


def main(link: Link) -> int:
    """The exit status: 0, or 1 once a fault was told."""
    try:
        run(link)
        return 0
    except Exception as error:
        if not isinstance(error, START_ERRORS):
            logger.exception("replica %d failed", link.setup.data_rank)
        link.send(Failed(type(error).__name__, str(error) or type(error).__name__))
        return 1
    finally:
        link.flush()


if __name__ == "__main__":
    # The parent hears a terminal's Ctrl-C and the supervisor's SIGTERM, and ends us when it is done.
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_IGN)
    _status = main(Link(Connection(int(sys.argv[1]))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)  # threads of libraries must not hold up the engine's end
