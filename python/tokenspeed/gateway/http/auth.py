# SPDX-License-Identifier: MIT
"""API keys: `Authorization: Bearer <key>` or `x-api-key: <key>`, compared in constant time.

Keys are never logged or put into an answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from tokenspeed.gateway.http.errors import ApiError


class KeyCheck:
    """Lets everything through when there are no keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def required(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self._keys)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise `ApiError` 401 unless the headers carry one of the keys: as a bearer token, or in x-api-key."""
        if not self._keys:
            return
        presented = presented_key(headers)
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        if not any(matches):
            raise ApiError(401, "invalid_api_key", "a valid API key is required: Authorization: Bearer <key>")


def presented_key(headers: Mapping[str, str]) -> bytes:
    """The key that a request carries, valid or not; empty without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("utf-8", "surrogateescape")  # as it came: a header may hold any bytes
