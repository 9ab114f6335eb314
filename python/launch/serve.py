# SPDX-License-Identifier: MIT
"""`bazel run //python:serve`: the command `ts serve`."""

import sys

from launch.environment import enter

enter()

from tokenspeed.cli.ts import main  # noqa: E402 - after enter(), which settles the import path

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
