# SPDX-License-Identifier: MIT
"""Attention over paged keys and values: metadata, reference and solutions."""
