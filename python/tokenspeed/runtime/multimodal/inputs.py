# SPDX-License-Identifier: MIT
"""Images, video and audio of a request."""

from tokenspeed.engine.media import Modality, MultimodalDataItem, MultimodalInputs

__all__ = ["Modality", "MultimodalDataItem", "MultimodalInputs"]
