# SPDX-License-Identifier: MIT
"""The page at `/` for people: one static file, which asks the same endpoints as any client.

It needs no key to be read (there is nothing in it); what it asks for needs one where keys are set. Its own script and
style are all that a browser may run: their hashes stand in the content security policy.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web


def page_route() -> web.RouteDef:
    """`GET /`. The file is read once."""
    page = Path(__file__).with_name("page.html").read_bytes()
    headers = {
        "content-security-policy": _policy(page.decode()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)

    return web.get("/", show)


def _policy(page: str) -> str:
    parts = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style")}
    allowed = [f"{tag}-src {' '.join(map(_hash, texts))}" for tag, texts in parts.items()]
    policy = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "frame-ancestors 'none'"]
    return "; ".join(policy + allowed)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
