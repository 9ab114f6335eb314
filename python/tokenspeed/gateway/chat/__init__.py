# SPDX-License-Identifier: MIT
"""Requests of the OpenAI surface: checked, fanned out to engines, answered."""
