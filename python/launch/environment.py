# SPDX-License-Identifier: MIT
"""What a program started by Bazel does before the command it stands for.

Bazel starts programs in their runfiles tree: relative paths of the caller are found from the caller's folder, and the
embedded model's path, which is relative to that tree, is made absolute for the processes that the command starts.
"""

import os
import sys


def enter() -> None:
    model = os.environ.get("TOKENSPEED_EMBEDDED_MODEL")
    if model and not os.path.isabs(model):
        os.environ["TOKENSPEED_EMBEDDED_MODEL"] = os.path.abspath(model)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.abspath(p) for p in sys.path if p and os.path.abspath(p) != here]
    if folder := os.environ.get("BUILD_WORKING_DIRECTORY"):
        os.chdir(folder)
