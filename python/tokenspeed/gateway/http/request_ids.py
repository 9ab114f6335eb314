# SPDX-License-Identifier: MIT
"""Names of requests that bring none. Unlike all others, but no secrets: nobody gains by guessing one."""

from __future__ import annotations

import random

# The system seeds it once a process; asking it for every name would be a system call each.
_draw = random.Random().getrandbits


def new_id(num_digits: int) -> str:
    """So many random hexadecimal digits."""
    return f"{_draw(4 * num_digits):0{num_digits}x}"
