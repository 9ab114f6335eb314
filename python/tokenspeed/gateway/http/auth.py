# SPDX-License-Identifier: MIT
"""API keys: `Authorization: Bearer <key>`, compared in constant time. Keys are never logged or put into an answer."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from tokenspeed.gateway.http.errors import ApiError


class KeyCheck:
    """Lets everything through when there are no keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raise `ApiError` 401 unless the header carries one of the keys."""
        if not self._keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        presented = given.strip().encode()
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(401, "invalid_api_key", "a valid API key is required: Authorization: Bearer <key>")
