# SPDX-License-Identifier: MIT
"""Grammars that outputs are constrained to: compiled beside the engine's loop, matched token by token on the host."""

from tokenspeed.grammar.backend import Backend, CompiledGrammar, GrammarError, Matcher, TokenTable
from tokenspeed.grammar.compiler import Compiled, GrammarCompiler
from tokenspeed.grammar.load import load_backend
from tokenspeed.grammar.meter import Meter

__all__ = [
    "Backend",
    "Compiled",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "Matcher",
    "Meter",
    "TokenTable",
    "load_backend",
]
