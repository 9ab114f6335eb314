# SPDX-License-Identifier: MIT
"""Architectures, each a page of layers, and the function that loads one."""

from tokenspeed.models.loading import load_model
from tokenspeed.models.model import Model
from tokenspeed.models.registry import model_class

__all__ = ["Model", "load_model", "model_class"]
