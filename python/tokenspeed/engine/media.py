# SPDX-License-Identifier: MIT
"""Images, video and audio of a request as servicers of other projects hand them over. Data only: no model here has an
encoder tower, so whoever carries such an item to the engine is refused by name."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PAD_BASE = 1_000_000
_PAD_RANGE = 715_494_549


class Modality(enum.IntEnum):
    """The number is part of an item's pad value."""

    IMAGE = 0
    VIDEO = 1
    AUDIO = 2


@dataclass
class ShmTensorHandle:
    """A tensor in shared memory, by name."""

    shm_name: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass
class MultimodalDataItem:
    """offsets: (first, last) prompt positions of each placeholder. hash: 64 bits of the content's."""

    modality: Modality
    feature: Any = None
    model_specific_data: dict[str, Any] = field(default_factory=dict)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    hash: int | None = None
    pad_value: int | None = None
    encode_handshake: dict[str, Any] | None = None

    def set_pad_value(self) -> None:
        """The token id that stands at the item's positions: other content, other ids."""
        content = 0 if self.hash is None else self.hash
        self.pad_value = _PAD_BASE + int(self.modality) * _PAD_RANGE + content % _PAD_RANGE


@dataclass
class MultimodalInputs:
    mm_items: list[MultimodalDataItem] = field(default_factory=list)
    im_token_id: int | None = None
    video_token_id: int | None = None


def hash_feature(feature: Any) -> int:
    """64 bits of a tensor's bytes, the same in every process."""
    values = np.ascontiguousarray(np.asarray(feature))
    return int.from_bytes(hashlib.sha256(values.tobytes()).digest()[:8], "little")


@dataclass
class EncodeRequest:
    """Items for an encoder process and where their embeddings are fetched from."""

    request_id: str
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    mm_items: list[MultimodalDataItem] = field(default_factory=list)
