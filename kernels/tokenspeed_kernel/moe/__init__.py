# SPDX-License-Identifier: MIT
"""Mixtures of experts: routing of tokens, and the feed-forward networks that they are routed to."""
