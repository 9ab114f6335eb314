# SPDX-License-Identifier: MIT
"""Why a schema or a regular expression cannot constrain output."""


class SchemaError(ValueError):
    """`path` is a JSON pointer into the schema ("#" is its root); the text names the keyword."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
