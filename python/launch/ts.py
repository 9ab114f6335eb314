# SPDX-License-Identifier: MIT
"""`bazel run //python:ts`: the command `ts`."""

import sys

from launch.environment import enter

enter()

from tokenspeed.cli.ts import main  # noqa: E402 - after enter(), which settles the import path

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
