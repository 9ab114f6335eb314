# SPDX-License-Identifier: MIT
"""`ts COMMAND`: serve, eval, bench, kernels and so on. Each command is a module, imported when asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from tokenspeed.cli._proc import die_with_parent
from tokenspeed.cli.errors import INTERRUPTED, USAGE, reporting
from tokenspeed.version import __version__

HELP = """\
usage: ts COMMAND ...

  serve [MODEL] [flags]       one engine and one gateway, supervised; `ts serve --help` lists the flags
  serve --headless [flags]    an engine alone, which dials a gateway
  eval [MODEL] --task T ...   score a model on a file of questions; `ts eval --help` lists tasks and flags
  bench serve [flags]         load a running server and tell its latencies; `ts bench serve --help` lists the flags
  kernels list                every operation and its solutions
  kernels explain [OP ...]    which kernel runs an operation here, and why the others do not
  kernels tune [--op OP]      measure the solutions and keep the fastest in the tuning table
  kernels bench [--op OP]     time the solutions beside torch and this machine's limits
  merge-traces FILES -o OUT   the Chrome traces of several ranks (of /start_profile) as one
  env                         versions and hardware, for a bug report
  version                     the version (also --version)
"""


BENCH_HELP = """\
usage: ts bench serve [flags]

  serve    load a running server and tell its latencies; `ts bench serve --help` lists the flags
"""
KERNELS_HELP = """\
usage: ts kernels COMMAND ...

  list                          every operation and its solutions
  explain [OP [NAME=VALUE ...]]  which kernel runs a call of an operation here, and why the others do not; the parts of
                                the call are device, dtype and the operation's traits
  tune                          measure the solutions and keep the fastest; `ts kernels tune --help` lists the flags
  bench                         time the solutions; `ts kernels bench --help` lists the flags
"""
_HELP_WORDS = ("--help", "-h", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when something failed, 2 when the command line or the model is wrong, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent()
    try:
        status = _run(*(words[0], words[1:]) if words else ("--help", []))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"ts {words[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has seen enough (`ts ... | head`). What is left to write must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: str, rest: list[str]) -> int:
    if command in _HELP_WORDS:
        return _say(HELP)
    if command == "serve":
        from tokenspeed.cli import serve

        return reporting("ts serve", lambda: serve.main(rest))
    if command == "eval":
        from tokenspeed.cli import eval_command

        return reporting("ts eval", lambda: eval_command.main(rest))
    if command == "bench":
        return _bench(rest)
    if command == "merge-traces":
        from tokenspeed.cli import merge_traces

        return reporting("ts merge-traces", lambda: merge_traces.main(rest))
    if command == "kernels":
        return _kernels(rest)
    if command == "env":
        return _alone("ts env", rest, _environment)
    if command in ("version", "--version"):
        return _alone("ts version", rest, lambda: __version__)
    return _wrong("ts", f"{command}: no such command (serve, eval, bench, kernels, merge-traces, env, version)")


def _say(text: str) -> int:
    print(text, end="")
    return 0


def _wrong(command: str, message: str) -> int:
    print(f"{command}: error: {message}", file=sys.stderr)
    return USAGE


def _environment() -> str:
    from tokenspeed.cli import env

    return env.report()


def _alone(command: str, rest: list[str], text: Callable[[], str]) -> int:
    """A command that takes nothing."""
    if rest[:1] and rest[0] in _HELP_WORDS:
        return _say(f"usage: {command}\n")
    if rest:
        return _wrong(command, f"{rest[0]}: takes no arguments")
    return _say(text() + "\n")


def _bench(rest: list[str]) -> int:
    if rest[:1] and rest[0] in _HELP_WORDS:
        return _say(BENCH_HELP)
    if rest[:1] != ["serve"]:
        return _wrong("ts bench", "usage: ts bench serve [flags]")
    from tokenspeed.cli import bench_command

    return reporting("ts bench serve", lambda: bench_command.main(rest[1:]))


def _kernels(rest: list[str]) -> int:
    command, arguments = (rest[0], rest[1:]) if rest else ("", [])
    if command in _HELP_WORDS or (command in ("list", "explain") and {"--help", "-h"} & set(arguments)):
        return _say(KERNELS_HELP)
    if command == "list" and not arguments:
        from tokenspeed_kernel import explain

        return explain.main([])
    if command == "explain":
        from tokenspeed_kernel import explain

        return explain.main(arguments)
    if command == "tune":
        from tokenspeed_kernel.bench import tune

        return tune.main(arguments)
    if command == "bench":
        from tokenspeed_kernel.bench import driver

        return driver.main(arguments)
    return _wrong("ts kernels", "usage: ts kernels list | explain [OP] [name=value ...] | tune | bench")


if __name__ == "__main__":
    sys.exit(main())
