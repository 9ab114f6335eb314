# SPDX-License-Identifier: MIT
"""The process in which `ts eval` runs one program that a model wrote; started by path with `python -I`, never imported.

Arguments: the program's file, seconds of processor time, bytes of memory. It limits itself, refuses sockets and other
processes by an audit hook, runs the program and writes `passed` or the error's line on the stdout it was given. Against
accidents only: this is no security boundary, and code that means harm can leave it.
"""

import os
import resource
import sys

_MAX_FILE_BYTES = 16 << 20
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "ctypes.",
)


def _limit(seconds: int, num_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: num_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _refuse(event: str, _: tuple[object, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused here")


def _run(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        source = file.read()
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "program"})
    # SystemExit too: a program that leaves before its test has not passed.
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "passed"


def _main() -> None:
    path, seconds, num_bytes = sys.argv[1:]
    out = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    _limit(int(seconds), int(num_bytes))
    sys.addaudithook(_refuse)
    os.write(out, _run(path).encode(errors="replace")[:500])
    os._exit(0)


if __name__ == "__main__":
    _main()
