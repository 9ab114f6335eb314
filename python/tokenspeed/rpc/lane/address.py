# SPDX-License-Identifier: MIT
"""Where the sockets of a lane live, computed from a worker URL.

A worker URL is `tcp://host:port` (the handshake listens there, the data plane on ephemeral ports of the same
host) or `ipc:///path` (the handshake listens on a loopback port derived from the path, the data plane on
`<path>-in.sock` and `<path>-out.sock`). Both ends and the supervisor call this; it opens no socket. Workers behind gRPC
(`split_grpc`) have a port and no lane's sockets.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tokenspeed.config.gateway_workers import GRPC_SCHEMES

HANDSHAKE_PORT_BASE = 20000
HANDSHAKE_PORT_SPAN = 10000
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_U64 = 0xFFFFFFFFFFFFFFFF


class AddressError(ValueError):
    """A worker URL or a socket directory that cannot be used; the message names it and says why."""


def fnv1a64(data: bytes) -> int:
    """64-bit FNV-1a hash of `data`."""
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & _U64
    return value


def zmq_handshake_port(url: str) -> int:
    """Loopback TCP port (20000..29999) of the handshake that belongs to an `ipc://` worker URL."""
    return HANDSHAKE_PORT_BASE + fnv1a64(_ipc_path(url).encode()) % HANDSHAKE_PORT_SPAN


def handshake_address(url: str) -> str:
    """The `tcp://host:port` that the gateway binds and the engine dials for the handshake of `url`."""
    if url.startswith("ipc://"):
        return f"tcp://127.0.0.1:{zmq_handshake_port(url)}"
    host, port = split_tcp(url)
    return f"tcp://{host}:{port}"


def data_addresses(url: str) -> tuple[str, str]:
    """The (input, output) addresses to bind for `url`; a tcp port of `*` means an ephemeral one."""
    if url.startswith("ipc://"):
        path = _ipc_path(url)
        return f"ipc://{path}-in.sock", f"ipc://{path}-out.sock"
    host, _ = split_tcp(url)
    return f"tcp://{host}:*", f"tcp://{host}:*"


def split_tcp(url: str) -> tuple[str, int]:
    """(host, port) of a `tcp://` URL. IPv6 hosts keep their brackets."""
    if not url.startswith("tcp://"):
        raise AddressError(f"worker URL {url!r} must start with tcp:// or ipc://")
    host, colon, port = url[len("tcp://") :].rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(f"worker URL {url!r} must be tcp://host:port")
    if host in ("*", "0.0.0.0", "[::]"):
        raise AddressError(f"worker URL {url!r} names a wildcard host; engines need one that they can reach")
    return host, int(port)


def split_grpc(url: str) -> tuple[bool, str]:
    """(whether with TLS, host:port) of a `grpc://` or `grpcs://` URL. Raises `AddressError`."""
    scheme = next((scheme for scheme in GRPC_SCHEMES if url.startswith(scheme)), "")
    target = url[len(scheme) :]
    host, colon, port = target.rpartition(":")
    if not scheme or not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AddressError(f"worker URL {url!r} must be grpc://host:port or grpcs://host:port")
    return scheme == "grpcs://", target


def prepare_ipc_directory(url: str) -> None:
    """Make the directory of an `ipc://` URL private (0700, ours) and remove sockets that a dead process left."""
    path = Path(_ipc_path(url))
    parent = path.parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = parent.stat()
    if info.st_uid != os.getuid():
        raise AddressError(f"directory {parent} of worker URL {url!r} belongs to uid {info.st_uid}, not to us")
    if stat.S_IMODE(info.st_mode) & 0o077:
        parent.chmod(0o700)
    for address in data_addresses(url):
        stale = Path(address[len("ipc://") :])
        if stale.exists() and stat.S_ISSOCK(stale.stat().st_mode):
            stale.unlink()


def _ipc_path(url: str) -> str:
    path = url[len("ipc://") :]
    if not url.startswith("ipc://") or not path.startswith("/"):
        raise AddressError(f"worker URL {url!r} must be ipc:///absolute/path")
    # The kernel's limit for a socket path is 107 bytes; the longest suffix that we add is "-out.sock".
    if len(path.encode()) > 98:
        raise AddressError(f"worker URL {url!r}: the socket path is longer than 98 bytes")
    return path
