# SPDX-License-Identifier: MIT
"""Whole processes among peers that break: garbage, loss, sudden death."""
