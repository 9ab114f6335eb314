# SPDX-License-Identifier: MIT
"""A part of the facade; see `tokenspeed.runtime`."""
