# SPDX-License-Identifier: MIT
"""Penalties, seeded sampling and log-probabilities."""
