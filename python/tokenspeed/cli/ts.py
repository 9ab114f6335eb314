# SPDX-License-Identifier: MIT
"""`ts COMMAND`: serve, eval, bench, kernels and so on. Each command is a module, imported when asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenspeed.cli._proc import die_with_parent
from tokenspeed.cli.errors import USAGE, reporting
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when something failed, 2 when the command line or the model is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent()
    command, rest = (words[0], words[1:]) if words else ("--help", [])
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
        from tokenspeed.cli import env

        print(env.report())
        return 0
    if command in ("version", "--version"):
        print(__version__)
        return 0
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    known = "serve, eval, bench, kernels, merge-traces, env, version"
    print(f"ts: error: {command}: no such command ({known})", file=sys.stderr)
    return USAGE


def _bench(rest: list[str]) -> int:
    if rest[:1] != ["serve"]:
        print("ts bench: error: usage: ts bench serve [flags]", file=sys.stderr)
        return USAGE
    from tokenspeed.cli import bench_command

    return reporting("ts bench serve", lambda: bench_command.main(rest[1:]))


def _kernels(rest: list[str]) -> int:
    command, arguments = (rest[0], rest[1:]) if rest else ("", [])
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
    print("ts kernels: error: usage: ts kernels list | explain [OP] [name=value ...] | tune | bench", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
