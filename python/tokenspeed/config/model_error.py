# SPDX-License-Identifier: MIT
"""The error of a model that cannot be used. Commands print its one line on stderr and exit with 2."""


class ModelError(ValueError):
    """One line that names the file (or hub id) at fault and what to do about it."""
