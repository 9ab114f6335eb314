# SPDX-License-Identifier: MIT
"""Grammars that outputs are constrained to: compiled beside the engine's loop, matched token by token on the host."""

from tokenspeed.grammar.backend import Backend, CompiledGrammar, GrammarError, Matcher, TokenTable
from tokenspeed.grammar.compiler import Compiled, GrammarCompiler
from tokenspeed.grammar.load import load_backend

__all__ = [
    "Backend",
    "Compiled",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "Matcher",
    "TokenTable",
    "load_backend",
]
