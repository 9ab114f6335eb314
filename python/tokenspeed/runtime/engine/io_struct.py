# SPDX-License-Identifier: MIT
"""Requests."""

from tokenspeed.engine.served_llm import GenerateReqInput

__all__ = ["GenerateReqInput"]
