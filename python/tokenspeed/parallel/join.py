# SPDX-License-Identifier: MIT
"""Process groups of our own: a process may have any number of them, and torch's default group stays the user's.

The first rank opens a `Meeting`, the others are told its address. `join` is called once a rank, by all at about the
same time; it returns when all are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tokenspeed.parallel.group import Group

# Its stubs know little of these classes.
dist: Any = torch.distributed

START_LIMIT_S = 300.0
"""That ranks have to come to a meeting: processes start, and machines are not started at one time."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: a TCP address of the first one's."""

    host: str
    port: int


class Opened:
    """The first rank's end of a meeting; keep it while the group is in use. port 0: any free one."""

    def __init__(self, host: str, port: int, num_ranks: int) -> None:
        self.store = _store(host, port, num_ranks, START_LIMIT_S, opens=True)
        self.meeting = Meeting(host, self.store.port)


def join(meeting: Meeting, rank: int, num_ranks: int, device: torch.device, ordered: bool, timeout_s: float) -> Group:
    """Our place in a group of `num_ranks`.

    ordered: as `Group` has it; always so on a CPU. timeout_s: for a collective on a CPU; those of GPUs are watched by
    whoever waits for their results. Raises RuntimeError when somebody does not come within `START_LIMIT_S`.
    """
    store = dist.PrefixStore("ranks", _store(meeting.host, meeting.port, num_ranks, START_LIMIT_S, opens=False))
    if device.type != "cpu":
        return Group(rank, num_ranks, _nccl(store, rank, num_ranks), ordered)
    gloo = _gloo(store, rank, num_ranks, meeting.host)
    gloo._set_default_timeout(timedelta(seconds=timeout_s))
    return Group(rank, num_ranks, gloo, ordered=True)


def _store(host: str, port: int, num_ranks: int, timeout_s: float, opens: bool) -> Any:
    return dist.TCPStore(host, port, num_ranks, opens, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _gloo(store: Any, rank: int, num_ranks: int, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=START_LIMIT_S)
    options._threads = 1
    # Ranks of one machine meet on its loopback device, whatever the machine's name resolves to.
    on_loopback = host.startswith("127.")
    gloo = dist.ProcessGroupGloo
    options._devices = [gloo.create_device(hostname=host) if on_loopback else gloo.create_default_device()]
    return gloo(store, rank, num_ranks, options)


def _nccl(store: Any, rank: int, num_ranks: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Captured collectives are in no list of NCCL's own watch; the engine has its own, and this one ends processes.
    options._timeout = timedelta(days=1)
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)
