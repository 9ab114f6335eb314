# SPDX-License-Identifier: MIT
"""Addresses of a lane, for the tests of both kinds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.support.processes import free_port


@pytest.fixture(params=["ipc", "tcp"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}"
    else:
        # Not tmp_path: a socket's path may have 107 bytes only.
        with tempfile.TemporaryDirectory(prefix="lane") as folder:
            yield f"ipc://{folder}/sockets/worker0"
