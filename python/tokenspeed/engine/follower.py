# SPDX-License-Identifier: MIT
"""Any rank but the first: builds the same engine, then repeats the first one's turns until it says stop.

A process of its own (`python -m tokenspeed.engine.follower ORDERS REPORTS`, two inherited sockets; behind them, on
another machine than the first rank's, its device and where the model lies there). Its main thread is the loop's; a
thread beside it says once a second that the process lives, and ends the process when the first rank is gone, whatever
the main thread waits for. It answers no request, opens no port, and ends with the first rank.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.config import hardware
from tokenspeed.config.constraint import Constraint
from tokenspeed.config.model_source import ModelSource
from tokenspeed.engine.admission import Grammars
from tokenspeed.engine.arrivals import QUIET, Told
from tokenspeed.engine.errors import START_ERRORS, EngineFault
from tokenspeed.engine.leader import Setup
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.messages import Command, StepOutput
from tokenspeed.engine.rank_link import Kind, LinkLost, Orders, Reports
from tokenspeed.engine.ranks import Choose
from tokenspeed.engine.turns import Digest, NoMirror, Turn, Verdict
from tokenspeed.grammar import Compiled, GrammarCompiler
from tokenspeed.parallel import Group
from tokenspeed.parallel.join import join
from tokenspeed_cc import Plan

logger = logging.getLogger("tokenspeed.engine")

_BEAT_S = 1.0
_POLL_S = 0.001


class Follower:
    """`Ranks` of any but the first; see there."""

    leads = False

    def __init__(self, orders: Orders, reports: Reports, group: Group) -> None:
        self.group = group
        self.mirror = Repeated()
        self.verdicts = Followed()
        self.transfers = Told(lambda moved: reports.send(moved=moved.transfer_id, ok=moved.ok, done=moved.done))
        self._orders = orders
        self._reports = reports
        self._operations: dict[str, Callable[..., None]] = {}

    def agree(self, what: str, value: Any, choose: Choose) -> Any:
        self.gather(what, value)
        kind, chosen, _ = self._orders.receive()
        if kind is Kind.STOP:
            raise LinkLost("the first rank has given up")
        if kind is not Kind.ANSWER:
            raise EngineFault(f"rank {self.group.rank} waits for an answer about {what} and was sent a {kind.name}")
        return chosen

    def gather(self, what: str, value: Any) -> list[Any]:
        self._reports.send(at=what, value=value)
        return []

    def does(self, name: str, operation: Callable[..., None]) -> None:
        self._operations[name] = operation

    def grammars(self, compiler: GrammarCompiler) -> Grammars:
        self.verdicts.compiler = compiler
        return self.verdicts

    def check(self) -> None:
        return

    def cause(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        self._orders.close()

    def follow(self, loop: EngineLoop) -> None:
        """Repeat the first rank's turns until it stops. Raises EngineFault when the two have come apart."""
        desk = Desk()
        loop.frontend = desk
        while True:
            kind, content, digest = self._orders.receive()
            if kind is Kind.STOP:
                loop.settle_all()
                return
            if digest != self.mirror.digest.value:
                raise EngineFault(
                    f"rank {self.group.rank} has planned or drawn something else than the first rank "
                    f"({self.mirror.digest.value:08x}, {digest:08x}, before turn {desk.num_turns}): "
                    "all ranks must take the same steps and see the same tokens"
                )
            if kind is Kind.OPERATION:
                operation = self._operations.get(content.name) or getattr(loop, content.name)
                operation(*content.arguments)
            elif kind is Kind.TURN:
                turn = content or Turn((), (), QUIET)
                desk.hand_over(turn.commands)
                self.verdicts.hand_over(turn.verdicts)
                self.transfers.hand_over(turn.news)
                loop.step()
            else:
                raise EngineFault(f"rank {self.group.rank} was sent a {kind.name} between two turns")


class Repeated(NoMirror):
    """Tells nobody, and remembers what was planned and drawn."""

    def __init__(self) -> None:
        self.digest = Digest()

    def planned(self, plan: Plan) -> None:
        self.digest.planned(plan)

    def settled(self, token_ids: NDArray[np.int32]) -> None:
        self.digest.settled(token_ids)


class Desk:
    """The loop's frontend: commands are the first rank's, and results are the same as its."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._commands: list[Command] = []

    def hand_over(self, commands: Sequence[Command]) -> None:
        self._commands = list(commands)
        self.num_turns += 1

    def drain(self, timeout_s: float) -> list[Command]:
        taken, self._commands = self._commands, []
        return taken

    def publish(self, output: StepOutput) -> None:
        return


class Followed:
    """Compiles what the first rank compiles, and takes its word for what has become of it: a grammar that is there on
    the first rank is waited for here, one that failed or took too long there is forgotten."""

    def __init__(self) -> None:
        self.compiler: GrammarCompiler | None = None
        self._verdicts: list[Verdict] = []
        self._ready: dict[Hashable, Compiled] = {}

    def hand_over(self, verdicts: Sequence[Verdict]) -> None:
        self._verdicts = list(verdicts)

    def submit(self, constraint: Constraint, ticket: Hashable) -> None:
        self._own().submit(constraint, ticket)

    def forget(self, ticket: Hashable) -> None:
        self._own().forget(ticket)
        self._ready.pop(ticket, None)

    def take(self) -> list[Compiled]:
        verdicts, self._verdicts = self._verdicts, []
        return [self._as_told(verdict) for verdict in verdicts]

    def _as_told(self, verdict: Verdict) -> Compiled:
        ticket = verdict.request_id
        if verdict.status:
            self.forget(ticket)
            return Compiled(ticket, None, verdict.error, verdict.status)
        while ticket not in self._ready:
            self._ready |= {done.ticket: done for done in self._own().take()}
            time.sleep(0 if ticket in self._ready else _POLL_S)
        done = self._ready.pop(ticket)
        if done.grammar is None:
            raise EngineFault(f"a grammar that the first rank has compiled failed here: {done.error}")
        return done

    def _own(self) -> GrammarCompiler:
        assert self.compiler is not None
        return self.compiler


@dataclass(frozen=True)
class Place:
    """What a rank of another machine than the first one's knows itself."""

    device: str
    source: ModelSource

    def of(self, setup: Setup) -> Setup:
        """`setup` as it is there."""
        config = replace(setup.config, device=replace(setup.config.device, device=self.device))
        return replace(setup, config=config, source=self.source, hardware=hardware.detect())


def main(orders: Orders, reports: Reports, place: Place | None) -> int:
    """Serve until the first rank stops. The exit status: 0, or 1 once a fault was reported."""
    threading.Thread(target=_live_with_the_first, args=(reports,), name="life", daemon=True).start()
    rank = -1
    try:
        _, setup, _ = orders.receive()
        rank = setup.rank
        run(setup if place is None else place.of(setup), orders, reports)
        return 0
    except LinkLost:
        return 1
    except Exception as error:
        if not isinstance(error, START_ERRORS):
            logger.exception("rank %d failed", rank)
        reports.send(fault=type(error).__name__, text=str(error) or type(error).__name__)
        return 1


def run(setup: Setup, orders: Orders, reports: Reports) -> None:
    """Build the engine of `setup` and follow."""
    from tokenspeed.engine.core import build

    config, parallel = setup.config, setup.config.parallel
    logging.basicConfig(
        level=config.log.log_level.upper(), format=f"%(asctime)s %(levelname)s rank {setup.rank}: %(message)s"
    )
    device = torch.device(config.device.device)
    ordered = config.device.deterministic
    group = join(setup.meeting, setup.rank, parallel.tensor_size, device, ordered, parallel.timeout_s)
    ranks = Follower(orders, reports, group)
    core = build(config, setup.source, setup.model_config, setup.hardware, lambda _: None, ranks)
    try:
        ranks.follow(core.loop)
    finally:
        core.loop.profiler.close()
        core.close()


def _live_with_the_first(reports: Reports) -> None:
    parent = os.getppid()
    while not reports.has_ended(_BEAT_S) and os.getppid() == parent:
        reports.send(beat=True)
    os._exit(1)


def _main() -> int:
    # The first rank hears a terminal's Ctrl-C and the supervisor's SIGTERM, and ends us when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, reports = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    place = None
    if len(sys.argv) > 3:
        device, kind, path, name = sys.argv[3:]
        place = Place(device, ModelSource(kind, Path(path), name))  # type: ignore[arg-type]
    return main(Orders(orders, None), Reports(reports), place)


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of libraries must not hold up the engine's end
