# SPDX-License-Identifier: MIT
"""Packed weight formats: layout, dequantisation, preparation for a device."""
