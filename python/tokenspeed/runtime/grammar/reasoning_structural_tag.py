# SPDX-License-Identifier: MIT
"""Constraints that begin behind a model's reasoning."""

from tokenspeed.engine.reasoning_tag import structural_tag_for_reasoning_json_schema

__all__ = ["structural_tag_for_reasoning_json_schema"]
