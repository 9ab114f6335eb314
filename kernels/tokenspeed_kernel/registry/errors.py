# SPDX-License-Identifier: MIT
"""The one error of the kernel library that a person can act on: it names what is wrong and what to do."""


class KernelError(ValueError):
    """No solution fits, an override or plugin is wrong, or a native module does not load. One line."""
