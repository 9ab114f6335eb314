# SPDX-License-Identifier: MIT
"""The folder that a lane's sockets of this machine lie in."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

from tokenspeed.rpc.lane import address


def test_the_directory_of_ipc_sockets_is_private_and_stale_sockets_go() -> None:
    with tempfile.TemporaryDirectory(prefix="lane") as folder:
        parent = Path(folder) / "sockets"
        parent.mkdir(mode=0o755)
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(f"{parent}/w-in.sock")
        stale.close()
        (parent / "w-out.sock").write_text("a file that is no socket stays")
        address.prepare_ipc_directory(f"ipc://{parent}/w")
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
        assert sorted(os.listdir(parent)) == ["w-out.sock"]
