# SPDX-License-Identifier: MIT
"""One of several gateway processes on a port: who it is, where it meets the others, and the workers that all have.

The process in front makes a private folder and tells each of its children, by an environment variable, its number
and that folder. Pure but for `from_environment`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenspeed.config.gateway_workers import over_grpc

MEMBER_ENV = "TOKENSPEED_GATEWAY_MEMBER"


def has_lane(url: str) -> bool:
    """Whether the worker dials us; those behind gRPC are dialled, by as many gateways as there are."""
    return not over_grpc(url)


@dataclass(frozen=True)
class Seat:
    """A worker of all the processes. `number` names its private lanes, and is never given twice."""

    number: int
    url: str
    priority: int


@dataclass(frozen=True)
class Seating:
    """All workers. Of two that arrive, the one with the higher number is true: they may overtake each other."""

    number: int
    seats: list[Seat]


@dataclass(frozen=True)
class Member:
    """`index` of `count` processes; `port`: the one that all of them listen on."""

    index: int
    count: int
    folder: str
    port: int

    @staticmethod
    def from_environment() -> Member | None:
        """This process's; None where it is the only gateway. Its own children are no members."""
        text = os.environ.pop(MEMBER_ENV, None)
        return None if text is None else Member(**json.loads(text))

    @property
    def environment(self) -> dict[str, str]:
        """What tells a child that it is this one."""
        return {MEMBER_ENV: json.dumps(asdict(self))}

    def lane_url(self, worker: int) -> str:
        """The private lane on which this member is given worker number `worker`."""
        return f"ipc://{self.folder}/g{self.index}w{worker}"

    def handshake_address(self, worker: int) -> str:
        """Where that lane's handshake listens: no port of the machine is taken."""
        return f"{self.lane_url(worker)}-hello.sock"

    def private_lanes(self, seats: Iterable[Seat]) -> dict[str, tuple[str, str]]:
        """For each worker that dials, the URL and the handshake address of this member's lane."""
        return {
            seat.url: (self.lane_url(seat.number), self.handshake_address(seat.number))
            for seat in seats
            if has_lane(seat.url)
        }

    @property
    def history_path(self) -> str:
        """A file for records that need not outlive the processes."""
        return f"{self.folder}/history.sqlite"

    @property
    def door(self) -> Path:
        """The Unix socket on which the other members reach this one."""
        return Path(self.folder) / f"door{self.index}.sock"

    @property
    def front(self) -> Path:
        """The Unix socket of the process in front, which knows the workers."""
        return Path(self.folder) / "front.sock"

    @property
    def siblings(self) -> list[Path]:
        """The doors of all members, this one's too."""
        return [Path(self.folder) / f"door{index}.sock" for index in range(self.count)]

    def share(self, limit: int) -> int:
        """This member's part of a limit for all of them; what is no limit stays none."""
        return limit if limit <= 0 else -(-limit // self.count)
