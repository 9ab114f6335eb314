# SPDX-License-Identifier: MIT
"""What drives an engine."""

from tokenspeed.engine.served_llm import ServedLLM as AsyncLLM

__all__ = ["AsyncLLM"]
