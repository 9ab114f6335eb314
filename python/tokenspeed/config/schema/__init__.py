# SPDX-License-Identifier: MIT
"""Which JSON schemas a request may ask for, and their normal form: pure, for the gateway and the engine alike."""

from tokenspeed.config.schema.error import SchemaError
from tokenspeed.config.schema.normal import normal_schema
from tokenspeed.config.schema.regex import check_regex

__all__ = ["SchemaError", "check_regex", "normal_schema"]
