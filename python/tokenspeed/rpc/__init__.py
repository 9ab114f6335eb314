# SPDX-License-Identifier: MIT
"""Protocols between processes. No torch, no engine: only sockets, bytes and the messages' types."""
