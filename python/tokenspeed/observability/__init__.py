# SPDX-License-Identifier: MIT
"""What the system says about itself: metrics, request statistics, log lines, KV events.

Everything here is passive: the engine and the gateway call it with numbers they already have. Nothing here imports
torch, waits for a device, or decides anything.
"""
