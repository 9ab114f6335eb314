# SPDX-License-Identifier: MIT
"""Activations fused with the multiplication by the up projection."""
