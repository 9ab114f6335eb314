# SPDX-License-Identifier: MIT
"""The caller's end of an engine behind gRPC."""
