# SPDX-License-Identifier: MIT
"""A scripted engine for tests (never part of a release)."""
