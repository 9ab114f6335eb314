# SPDX-License-Identifier: MIT
"""The engine's end of the gRPC lane: an engine in this process and the services in front of it."""
