# SPDX-License-Identifier: MIT
"""What outlives a request: stored responses and conversations."""
