# SPDX-License-Identifier: MIT
"""CURVE keys of a lane: who may dial a gateway, and which gateway an engine trusts. No socket is opened here.

A key is 40 characters of Z85, as `zmq.curve_keypair()` makes them. Secret keys come from files, never from the command
line; both ends need both of their flags, because half a pair would protect nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.config.flags import FlagError

SECRET_FLAG, SERVER_FLAG, PEERS_FLAG = (
    "--zmq-curve-secret-key-file",
    "--zmq-curve-server-key",
    "--zmq-curve-peer-keys-file",
)
_KEY_LENGTH = 40
_Z85 = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True)
class EngineCurve:
    """An engine's own secret key, and the public key of the gateway that it dials."""

    secret_key: str = field(repr=False)
    server_key: str


@dataclass(frozen=True)
class GatewayCurve:
    """A gateway's own secret key, and the public keys of the engines that may dial it."""

    secret_key: str = field(repr=False)
    peer_keys: frozenset[str]


def engine_curve(secret_file: str | None, server_key: str | None) -> EngineCurve | None:
    """None without flags. Raises FlagError for one without the other, and for what is no key."""
    if secret_file is None and server_key is None:
        return None
    if secret_file is None or server_key is None:
        raise FlagError(SECRET_FLAG, f"and {SERVER_FLAG} belong together")
    return EngineCurve(_secret(secret_file), _checked(SERVER_FLAG, server_key))


def gateway_curve(secret_file: str | None, peers_file: str | None) -> GatewayCurve | None:
    """None without flags. Raises FlagError for one without the other, and for what is no key."""
    if secret_file is None and peers_file is None:
        return None
    if secret_file is None or peers_file is None:
        raise FlagError(SECRET_FLAG, f"and {PEERS_FLAG} belong together")
    peers = frozenset(_checked(PEERS_FLAG, key) for key in _read(PEERS_FLAG, peers_file).split())
    if not peers:
        raise FlagError(PEERS_FLAG, f"{peers_file} has no key")
    return GatewayCurve(_secret(secret_file), peers)


def _secret(path: str) -> str:
    return _checked(SECRET_FLAG, _read(SECRET_FLAG, path).strip())


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        raise FlagError(flag, f"{path} cannot be read") from None


def _checked(flag: str, key: str) -> str:
    """The key is not repeated in the error: it may be a secret."""
    if len(key) != _KEY_LENGTH or not _Z85.issuperset(key):
        raise FlagError(flag, f"a key has {_KEY_LENGTH} characters of Z85")
    return key
