# SPDX-License-Identifier: MIT
"""The released peers against our engine and gateway, each a process of its own."""
