# SPDX-License-Identifier: MIT
"""CURVE on the sockets of a lane: the engine proves its key, the gateway lets known keys in. Every frame is encrypted.

ZMQ asks the gateway about each connection (ZAP, RFC 27) before a single frame of it is read; whoever is refused, has no
key, or speaks without encryption is dropped there and gets nothing.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from tokenspeed.config.curve import EngineCurve, GatewayCurve

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


def secure_engine(socket: zmq.Socket[bytes], curve: EngineCurve | None) -> None:
    """Before it connects."""
    if curve is None:
        return
    secret = curve.secret_key.encode()
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)
    socket.curve_serverkey = curve.server_key.encode()


def secure_gateway(socket: zmq.Socket[bytes], curve: GatewayCurve | None) -> None:
    """Before it binds; `judge` must be answering on ZAP_ADDRESS of its context by then."""
    if curve is None:
        return
    socket.curve_server = True
    socket.curve_secretkey = curve.secret_key.encode()
    socket.zap_domain = b"lane"


def judge(frames: list[bytes], curve: GatewayCurve) -> list[bytes]:
    """The reply to a ZAP request: in with a known key, out with any other."""
    version, request_id, _domain, peer, _identity, mechanism, *credentials = frames
    known = (
        version == _VERSION
        and mechanism == b"CURVE"
        and len(credentials) == 1
        and z85.encode(credentials[0]).decode() in curve.peer_keys
    )
    if known:
        return [_VERSION, request_id, b"200", b"OK", b"", b""]
    logger.warning("a peer at %s has no key of this lane", peer.decode(errors="replace"))
    return [_VERSION, request_id, b"400", b"unknown key", b"", b""]
