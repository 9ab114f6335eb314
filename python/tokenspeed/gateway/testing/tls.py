# SPDX-License-Identifier: MIT
"""A certificate for 127.0.0.1, its key, and the authority that signed it: made for tests, valid for a hundred years,
trusted by nobody else. A server and a client may both use it."""

from __future__ import annotations

from pathlib import Path

CA = b"""\
-----BEGIN CERTIFICATE-----
MIIBiDCCAS+gAwIBAgIUFIM+FWK+5a63ISQCkjsXNyNHaCIwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOdGVzdCBhdXRob3JpdHkwIBcNMjYxMTMwMDI1MDEyWhgPMjEy
NjExMDYwMjUwMTJaMBkxFzAVBgNVBAMMDnRlc3QgYXV0aG9yaXR5MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAEhQJOPm3Y+2C8hPbksAYpRaJgk8mcsO8iA00jsUt8
vISuANLUXgTBWDYbJ26XbYdqd+x9tOom3wBR3WsJGOjJmqNTMFEwHQYDVR0OBBYE
FGcmF/27GnUPThUa9exQ69clD/3pMB8GA1UdIwQYMBaAFGcmF/27GnUPThUa9exQ
69clD/3pMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgPQSCKRoP
8OHYK7GK3SYKKt1vEkM1DlkyzZNaq8BhNN0CIEZZnAxG0E3ke/hFKO6w9QmFrBIW
MO26DA+TjJjDlXjQ
-----END CERTIFICATE-----
"""

KEY = b"""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpDqsLWOF4hx3bNEm
clAn1MqQ/EVgbqnXRiGEeWyDufahRANCAARlZh95H4emkzhHcywK8BkwFr1kk5un
7LCfu8o4TeCjjmJX3Tt0TJsk98SJ0U9YyFMEeWTv+cgpN9iQBsAGdazR
-----END PRIVATE KEY-----
"""

CERTIFICATE = b"""\
-----BEGIN CERTIFICATE-----
MIIBrjCCAVSgAwIBAgIUJzx+SBPo5g1PJF+1aJLtksqldDowCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOdGVzdCBhdXRob3JpdHkwIBcNMjYxMTMwMDI1MDEyWhgPMjEy
NjExMDYwMjUwMTJaMBQxEjAQBgNVBAMMCTEyNy4wLjAuMTBZMBMGByqGSM49AgEG
CCqGSM49AwEHA0IABGVmH3kfh6aTOEdzLArwGTAWvWSTm6fssJ+7yjhN4KOOYlfd
O3RMmyT3xInRT1jIUwR5ZO/5yCk32JAGwAZ1rNGjfTB7MBoGA1UdEQQTMBGHBH8A
AAGCCWxvY2FsaG9zdDAdBgNVHSUEFjAUBggrBgEFBQcDAQYIKwYBBQUHAwIwHQYD
VR0OBBYEFEEaUyeVuXN45ETWnS24feZ4XM3BMB8GA1UdIwQYMBaAFGcmF/27GnUP
ThUa9exQ69clD/3pMAoGCCqGSM49BAMCA0gAMEUCIGl2iNhJJ0SRp6uSYfHdeSQK
+vDBCx9QAnOKpoEqk40gAiEA/t1wXi4BG/aPR0+VdM4MKU+tvV0C6/T2ZBbrQ+K/
O4U=
-----END CERTIFICATE-----
"""


def write_tls(folder: Path) -> tuple[str, str, str]:
    """Paths of the files of `CA`, `CERTIFICATE` and `KEY`."""
    paths = []
    for name, content in (("ca.pem", CA), ("certificate.pem", CERTIFICATE), ("key.pem", KEY)):
        (folder / name).write_bytes(content)
        paths.append(str(folder / name))
    return paths[0], paths[1], paths[2]
