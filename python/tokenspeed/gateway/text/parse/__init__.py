# SPDX-License-Identifier: MIT
"""Machines that split a model's text into reasoning, content and tool calls."""
