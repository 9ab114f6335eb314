# SPDX-License-Identifier: MIT
"""The backend that a flag names. The libraries are imported here, in a compiler's thread, and not before."""

from __future__ import annotations

from tokenspeed.grammar.backend import Backend, TokenTable


def load_backend(name: str, table: TokenTable, any_whitespace: bool) -> Backend:
    """name: "xgrammar" or "llguidance". any_whitespace: whether JSON may have blanks between its parts."""
    if name == "xgrammar":
        from tokenspeed.grammar.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(table, any_whitespace)
    if name == "llguidance":
        from tokenspeed.grammar.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(table, any_whitespace)
    raise ValueError(f"no grammar backend {name!r}")
