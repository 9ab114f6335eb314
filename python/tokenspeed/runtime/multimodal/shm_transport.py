# SPDX-License-Identifier: MIT
"""Tensors in shared memory."""

from tokenspeed.engine.media import ShmTensorHandle

__all__ = ["ShmTensorHandle"]
