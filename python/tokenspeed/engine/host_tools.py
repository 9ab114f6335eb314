# SPDX-License-Identifier: MIT
"""Small questions to the host that servicers of other projects ask: who are my children, what is my address."""

from __future__ import annotations

import os
import socket

import psutil


def kill_process_tree(pid: int | None = None, include_parent: bool = True) -> None:
    """SIGKILL to a process's descendants, then to it. pid None: this process. Whoever is gone already is gone."""
    try:
        parent = psutil.Process(os.getpid() if pid is None else pid)
        doomed = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in [*doomed, *([parent] if include_parent else [])]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def get_local_ip_by_remote(remote: str = "8.8.8.8") -> str:
    """The address of this host that `remote` is reached from; nothing is sent. Loopback when there is no route."""
    for family, address in ((socket.AF_INET, remote), (socket.AF_INET6, "2001:4860:4860::8888")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 80))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"
