# SPDX-License-Identifier: MIT
"""The clocks of a first token see the same requests, and each of them more than the one behind it."""

from __future__ import annotations

from tools.bench.first_token import bench


def test_three_clocks_of_the_same_requests() -> None:
    numbers = bench([2], 6)["2"]
    assert set(numbers) == {"client_ms", "gateway_ms", "engine_ms", "added_ms"}
    assert 0 < numbers["engine_ms"] < numbers["client_ms"]
    assert 0 < numbers["gateway_ms"] < numbers["client_ms"]
    assert abs(numbers["client_ms"] - numbers["engine_ms"] - numbers["added_ms"]) < 0.02
