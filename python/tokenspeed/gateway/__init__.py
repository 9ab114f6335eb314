# SPDX-License-Identifier: MIT
"""The OpenAI-compatible gateway: HTTP in front, engines behind the ZMQ lane. Imports no torch, engine or kernel."""
