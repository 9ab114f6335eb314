# SPDX-License-Identifier: MIT
"""A JSON schema that holds only behind a model's reasoning, as a structural tag."""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.config.constraint import Constraint
from tokenspeed.gateway.text.parse.names import reasoning_end


def structural_tag_for_reasoning_json_schema(parser: str, schema: Any) -> str | None:
    """None for a parser whose reasoning has no closing marker: then the schema holds from the first token on."""
    end = reasoning_end(parser)
    return None if end is None else Constraint("json_schema", json.dumps(schema), end).prepared().text
