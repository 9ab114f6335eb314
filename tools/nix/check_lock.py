# SPDX-License-Identifier: MIT
"""Checks that flake.lock pins exactly what flake.nix asks for: check_lock.py flake.nix flake.lock.

Nix does this itself where it can reach the inputs. Where it cannot, a lock that says something else than the flake
would go unnoticed until somebody with a network gets a different nixpkgs.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def problems(flake: str, lock: dict[str, Any]) -> Iterator[str]:
    """What is wrong, in words; nothing when the lock is good."""
    asked = dict(re.findall(r'^\s*inputs\.(\w+)\.url = "([^"]+)";', flake, re.MULTILINE))
    nodes = lock["nodes"]
    if lock["version"] != 7:
        yield f"version {lock['version']} is not 7"
    if nodes["root"]["inputs"] != {name: name for name in asked}:
        yield f"the inputs of flake.nix are {sorted(asked)}, those of the lock {sorted(nodes['root']['inputs'])}"
    for name in asked.keys() & nodes.keys():
        original, locked = nodes[name]["original"], nodes[name]["locked"]
        if original != {"type": "tarball", "url": asked[name]}:
            yield f"{name}: the lock was made for {original.get('url')}, flake.nix asks for {asked[name]}"
        if locked["url"] != asked[name]:
            yield f"{name}: locked to {locked['url']}"
        if locked["rev"][:12] not in locked["url"]:
            yield f"{name}: revision {locked['rev']} is not the one in the address"
        algorithm, _, digest = locked["narHash"].partition("-")
        if algorithm != "sha256" or len(base64.b64decode(digest, validate=True)) != 32:
            yield f"{name}: narHash is not a SHA-256"


def main() -> int:
    flake, lock = sys.argv[1:3]
    found = list(problems(Path(flake).read_text(), json.loads(Path(lock).read_text())))
    for text in found:
        print(f"{lock}: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
