# SPDX-License-Identifier: MIT
"""Logit processors that arrive as text: JSON {"callable": hex of a pickle}, the form that servers of this kind share.

Loading one runs the caller's code, so admission lets them through only where `--enable-custom-logit-processor` allows
it. The pickle names a class or function that this process can import, or is an instance of one. It is called with
float32 logits [1, vocabulary] and a list with the request's `custom_params`, and returns logits.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

from tokenspeed.sampling.rules import Processor


class ProcessorError(ValueError):
    """A serialised processor that cannot be loaded; the text says why."""


def load_processor(serialised: str, custom_params: Mapping[str, Any] | None) -> Processor:
    """Raises ProcessorError."""
    try:
        loaded = pickle.loads(bytes.fromhex(json.loads(serialised)["callable"]))
        call = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # noqa: BLE001  (a pickle may raise anything)
        raise ProcessorError(f"it cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(call):
        raise ProcessorError("it is no callable")
    params = [dict(custom_params or {})]

    def process(output_ids: list[int], logits: Any) -> Any:
        return call(logits[None], params)[0]

    return process
