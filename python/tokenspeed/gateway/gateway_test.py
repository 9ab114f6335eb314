# SPDX-License-Identifier: MIT
"""What the gateway loads: nothing of the engine, and no torch."""

from __future__ import annotations

import os
import subprocess
import sys

FORBIDDEN = ("torch", "tokenspeed_kernel", "tokenspeed_cc", "tokenspeed.engine", "tokenspeed.models", "transformers")


def test_the_gateway_imports_no_torch_engine_or_kernel() -> None:
    code = "import sys, tokenspeed.gateway.app; print('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    modules = run.stdout.split()
    assert "tokenspeed.gateway.http.server" in modules
    assert [name for name in modules if name in FORBIDDEN] == []
