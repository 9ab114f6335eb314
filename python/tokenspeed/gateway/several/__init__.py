# SPDX-License-Identifier: MIT
"""Several gateway processes on one port."""
