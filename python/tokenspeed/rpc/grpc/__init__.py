# SPDX-License-Identifier: MIT
"""The gRPC lane: what both ends share stands here; `serve` is the engine's end."""
