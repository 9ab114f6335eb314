# SPDX-License-Identifier: MIT
"""How close a solution must come to its reference, and the random calls on which that is checked.

`cases` makes calls of every operation; `check` runs one through a solution and its reference and compares. Used by
the tests, by the benchmark driver and by the check that runs on a GPU machine.
"""
