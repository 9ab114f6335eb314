# SPDX-License-Identifier: MIT
"""The version of TokenSpeed; the wheel, the lane's handshake and `ts version` read it here."""

__version__ = "0.1.0"
