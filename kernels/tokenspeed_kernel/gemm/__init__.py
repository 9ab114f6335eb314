# SPDX-License-Identifier: MIT
"""Matrix products with dense or packed weights, and the look-ups that read the same weight layouts."""
