# SPDX-License-Identifier: MIT
"""The ZMQ lane between a gateway and engine ranks: messages in `wire`, one module for each end."""
