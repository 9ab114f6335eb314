# SPDX-License-Identifier: MIT
"""`smg launch [flags]`: a gateway alone, in front of engines that dial it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from tokenspeed.cli._proc import die_with_parent
from tokenspeed.cli.errors import USAGE, reporting
from tokenspeed.config.gateway import launch_help, parse_launch
from tokenspeed.config.member import Member
from tokenspeed.version import __version__

HELP = """\
usage: smg COMMAND ...

  launch --worker-urls URL ... --model-path MODEL [flags]    serve; `smg launch --help` lists the flags
  version                                                    the version (also --version)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a shutdown, 1 when something failed, 2 when the command line or the model is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent()
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command == "launch":
        return reporting("smg launch", lambda: _launch(rest))
    if command in ("version", "--version"):
        print(__version__)
        return 0
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    print(f"smg: error: {command}: no such command (launch, version)", file=sys.stderr)
    return USAGE


def _launch(rest: list[str]) -> int:
    if "--help" in rest or "-h" in rest:
        print(launch_help())
        return 0
    config = replace(parse_launch(rest), member=Member.from_environment())
    if config.num_gateways > 1 and config.member is None:
        from tokenspeed.gateway.several import front

        return front.run(config, rest)
    from tokenspeed.gateway import app

    return app.run(config)


if __name__ == "__main__":
    sys.exit(main())
