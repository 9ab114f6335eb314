# SPDX-License-Identifier: MIT
"""Rotary position embedding."""
