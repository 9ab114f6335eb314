# SPDX-License-Identifier: MIT
"""A model's shape."""

from tokenspeed.engine.model_view import ModelView as ModelConfig

__all__ = ["ModelConfig"]
