# SPDX-License-Identifier: MIT
"""Why a gateway process cannot start."""

from __future__ import annotations


class StartError(Exception):
    """The gateway cannot start; one line that names what is wrong. `status` is the exit status: 2 when the command
    line or a file that it names is wrong, 1 when this machine is in the way (a port in use)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
