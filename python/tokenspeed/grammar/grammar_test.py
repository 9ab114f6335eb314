# SPDX-License-Identifier: MIT
"""Both backends over a vocabulary of bytes and a few longer tokens; the compiler service over a scripted backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.processes import wait_until
from tokenspeed.config.constraint import Constraint
from tokenspeed.config.resolve import GrammarConfig
from tokenspeed.grammar import Backend, Compiled, GrammarCompiler, GrammarError, Matcher, TokenTable, load_backend

EOS, THINK_END, UNUSED, OTHER_STOP = 256, 257, 258, 259
WORDS = [b'{"', b'":', b"true", b"\xed\x95\x9c", b"</th", b"ink>"]
TOKENS = [bytes([value]) for value in range(256)] + [b"", b"", b"", b"\n\n"] + WORDS
TABLE = TokenTable(TOKENS, {"<eos>": EOS, "</think>": THINK_END, "<unused>": UNUSED}, (EOS,))
WORDS_A_ROW = -(-len(TOKENS) // 32)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, TABLE, True)


def matcher(backend: Backend, kind: str, text: str, end: str | None = None, stops: Sequence[int] = (EOS,)) -> Matcher:
    return backend.compile(Constraint(kind, text, end).prepared()).matcher(stops)


def allowed(it: Matcher) -> set[int]:
    row = np.zeros(WORDS_A_ROW, np.int32)
    it.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return {token for token in np.flatnonzero(bits).tolist() if token < len(TOKENS)}


def feed(it: Matcher, text: str) -> None:
    for value in text.encode():
        assert value in allowed(it), (text, bytes([value]), allowed(it))
        assert it.accept(value)


def ends(it: Matcher) -> bool:
    return EOS in allowed(it)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}', '{"a": 12}', '{"b'),
        ("json_schema", '{"enum":["x","한"]}', '"한"', '"y'),
        ("regex", "[a-c]{2}x", "abx", "ad"),
        ("regex", "^(|x*)$", "xx", "y"),
        ("ebnf", 'root ::= "a" tail\ntail ::= [0-9]+ | "!"', "a42", "b"),
        (
            "structural_tag",
            '{"format":{"type":"or","elements":[{"type":"const_string","value":"on"},{"type":"const_string","value":"off"}]}}',
            "off",
            "om",
        ),
    ],
)
def test_texts_of_the_grammar_are_let_through_and_others_stopped(
    backend: Backend, kind: str, text: str, good: str, bad: str
) -> None:
    it = matcher(backend, kind, text)
    feed(it, good)
    assert ends(it)
    assert it.accept(EOS) and it.is_terminated
    other = matcher(backend, kind, text)
    data = bad.encode()
    for value in data[:-1]:
        assert other.accept(value)
    assert data[-1] not in allowed(other) and not other.accept(data[-1])


def test_the_end_is_allowed_where_the_text_is_complete_and_nowhere_else(backend: Backend) -> None:
    it = matcher(backend, "regex", "ab?")
    assert not ends(it) and not it.accept(EOS)
    feed(it, "a")
    assert allowed(it) == {ord("b"), EOS}
    feed(it, "b")
    assert allowed(it) == {EOS}


def test_tokens_of_several_bytes_and_special_ones(backend: Backend) -> None:
    it = matcher(backend, "regex", '(\\{"a":true|b)')
    assert allowed(it) == {ord("b"), ord("{"), TOKENS.index(b'{"')}
    assert UNUSED not in allowed(matcher(backend, "regex", "(.|\\n)*"))
    assert it.accept(TOKENS.index(b'{"')) and it.accept(ord("a")) and it.accept(TOKENS.index(b'":'))
    assert TOKENS.index(b"true") in allowed(it) <= {ord("t"), TOKENS.index(b"true")}


def test_a_requests_own_stop_tokens_end_a_complete_text_and_never_stand_in_it(backend: Backend) -> None:
    it = matcher(backend, "regex", "a\\n*", stops=(EOS, OTHER_STOP))
    assert OTHER_STOP not in allowed(it)
    feed(it, "a")
    assert {ord("\n"), OTHER_STOP, EOS} == allowed(it)
    assert it.accept(OTHER_STOP) and it.is_terminated


def test_what_no_text_satisfies_is_an_error(backend: Backend) -> None:
    with pytest.raises(GrammarError, match="no text satisfies it"):
        matcher(backend, "ebnf", "root ::= root")


ENDLESS = [
    'root ::= "a" root',
    'root ::= "a" b\nb ::= ("c" b)+ | b{2,3}',
    'root ::= (a | b)\na ::= "x" b\nb ::= [a-z]* a',
]
FINITE = [
    'root ::= "(" root ")" | ""',
    'root ::= "a" root?',
    r'root ::= b{0,2} "\\" [")] "x | y"' + '\nb ::= "q" b',
    'root ::= a | b\na ::= "x" a\nb ::= "] a"',
]


@pytest.mark.parametrize("text", [*ENDLESS, *FINITE])
def test_a_grammar_whose_rules_only_lead_back_to_themselves_is_an_error(text: str) -> None:
    backend = load_backend("xgrammar", TABLE, True)
    if text in FINITE:
        matcher(backend, "ebnf", text)
        return
    with pytest.raises(GrammarError, match="no text satisfies it"):
        matcher(backend, "ebnf", text)


def test_matchers_of_one_grammar_are_independent(backend: Backend) -> None:
    compiled = backend.compile(Constraint("regex", "a(b|c)", None))
    first, second = compiled.matcher((EOS,)), compiled.matcher((EOS,))
    feed(first, "ab")
    assert allowed(second) == {ord("a")}
    assert compiled.num_bytes > 0


@pytest.mark.parametrize("marker", ["</think>", "</thinking>"])
def test_text_before_the_end_of_reasoning_is_free_and_what_follows_is_not(backend: Backend, marker: str) -> None:
    it = matcher(backend, "json_schema", '{"type":"object","properties":{}}', marker)
    feed(it, 'It says {"a": 1} </thi no')
    assert not ends(it)
    if marker == "</think>":
        assert it.accept(THINK_END), "a marker that is one special token"
    else:
        feed(it, marker)
    feed(it, "\n{}")
    assert ends(it) and ord("x") not in allowed(it)


def test_json_has_no_endless_blanks(backend: Backend) -> None:
    it = matcher(backend, "json_schema", '{"type":"array","items":{"type":"null"}}')
    feed(it, "[")
    count = 0
    while ord("\n") in allowed(it) and count < 100:
        it.accept(ord("\n"))
        count += 1
    assert count < 20


def test_without_blanks_json_is_compact() -> None:
    for name in ("xgrammar", "llguidance"):
        it = matcher(load_backend(name, TABLE, False), "json_schema", '{"type":"array","items":{"type":"null"}}')
        feed(it, "[null,null")
        assert ord(" ") not in allowed(it)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", "root ::= missing"),
        ("ebnf", 'root ::= "a'),
        ("structural_tag", '{"format":{"type":"no_such_format"}}'),
    ],
)
def test_what_cannot_be_compiled_is_an_error_in_one_line(backend: Backend, kind: str, text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend.compile(Constraint(kind, text, None).prepared())
    assert str(caught.value) and "\n" not in str(caught.value)


# ---- the service -----------------------------------------------------------------------------------------------


class Grammar:
    num_bytes = 1000

    def matcher(self, stop_token_ids: Sequence[int]) -> Any:
        raise AssertionError("nobody matches here")


class Gated:
    """A backend whose compilations end when their text's gate opens."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def gate(self, text: str) -> threading.Event:
        return self.gates.setdefault(text, threading.Event())

    def compile(self, constraint: Constraint) -> Grammar:
        self.calls.append(constraint.text)
        self.gate(constraint.text).wait(20)
        if "bad" in constraint.text:
            raise GrammarError("bad grammar")
        if "bug" in constraint.text:
            raise ZeroDivisionError("ours")
        return Grammar()


class Bench:
    def __init__(self, **changes: Any) -> None:
        values = {
            "backend": "xgrammar",
            "timeout_s": 30.0,
            "max_retries": 0,
            "any_whitespace": True,
            "num_threads": 2,
            "cache_bytes": 10_000,
            "max_lost": 2,
        }
        self.now_s = 0.0
        self.backend = Gated()
        self.numbers = itertools.count()
        self.service = GrammarCompiler(GrammarConfig(**{**values, **changes}), lambda: self.backend, lambda: self.now_s)

    def ask(self, text: str, open_gate: bool = True) -> int:
        ticket = next(self.numbers)
        if open_gate:
            self.backend.gate(text).set()
        self.service.submit(Constraint("regex", text, None), ticket)
        return ticket

    def taken(self, count: int) -> dict[Any, Compiled]:
        found: dict[Any, Compiled] = {}
        wait_until(lambda: found.update({entry.ticket: entry for entry in self.service.take()}) or len(found) >= count)
        return found

    def await_calls(self, count: int) -> None:
        wait_until(lambda: len(self.backend.calls) == count)

    def taken_at_once(self, text: str) -> Compiled:
        ticket = self.ask(text, open_gate=False)
        (entry,) = self.service.take()
        assert entry.ticket == ticket
        return entry


def test_requests_with_one_constraint_share_one_compilation_and_later_ones_the_cache() -> None:
    bench = Bench()
    first, second = bench.ask("a", open_gate=False), bench.ask("a")
    done = bench.taken(2)
    third = bench.ask("a")
    done |= bench.taken(1)
    assert {first, second, third} == set(done) and bench.backend.calls == ["a"]
    assert all(entry.grammar is done[first].grammar for entry in done.values())
    assert bench.service.num_waiting == 0


def test_errors_are_told_and_kept_and_faults_of_ours_are_not_the_callers() -> None:
    bench = Bench()
    bad, bug = bench.ask("bad"), bench.ask("bug")
    done = bench.taken(2)
    assert (done[bad].status, done[bad].error) == (400, "bad grammar")
    assert done[bug].status == 503 and "ours" in done[bug].error
    again = bench.ask("bad")
    assert bench.taken(1)[again].status == 400 and bench.backend.calls.count("bad") == 1


def test_a_compilation_that_takes_too_long_is_answered_and_others_go_on() -> None:
    bench = Bench(timeout_s=5.0, num_threads=1)
    slow = bench.ask("slow", open_gate=False)
    wait_until(lambda: bench.backend.calls == ["slow"])
    quick = bench.ask("quick")
    assert bench.service.take() == []
    bench.now_s = 6.0
    done = bench.taken(2)
    assert done[slow].status == 400 and "5 s" in done[slow].error
    assert done[quick].grammar is not None, "another thread has taken the lost one's place"
    assert bench.taken_at_once("slow").status == 400


def test_when_every_spare_thread_is_lost_new_constraints_are_refused_until_one_comes_back() -> None:
    bench = Bench(timeout_s=5.0, num_threads=1, max_lost=2)
    for number in range(2):
        bench.ask(f"slow{number}", open_gate=False)
        bench.await_calls(number + 1)
        bench.now_s += 6.0
        bench.taken(1)
    assert bench.taken_at_once("new").status == 503
    bench.backend.gate("slow0").set()

    def accepted() -> bool:
        ticket = bench.ask("new")
        return bench.taken(1)[ticket].grammar is not None

    wait_until(accepted)


def test_a_retry_is_another_attempt() -> None:
    bench = Bench(timeout_s=5.0, max_retries=1)
    ticket = bench.ask("slow", open_gate=False)
    wait_until(lambda: len(bench.backend.calls) == 1)
    bench.now_s = 6.0
    assert bench.service.take() == []
    wait_until(lambda: len(bench.backend.calls) == 2)
    bench.backend.gate("slow").set()
    assert bench.taken(1)[ticket].grammar is not None


def test_the_cache_is_bounded() -> None:
    bench = Bench(cache_bytes=2_500)
    for text in ("a", "b", "c", "a"):
        ticket = bench.ask(text)
        assert bench.taken(1)[ticket].grammar is not None
    assert bench.backend.calls == ["a", "b", "c", "a"], "of three grammars the cache has room for two"


def test_nobody_hears_of_a_forgotten_ticket() -> None:
    bench = Bench()
    gone, stays = bench.ask("a", open_gate=False), bench.ask("a", open_gate=False)
    bench.service.forget(gone)
    bench.backend.gate("a").set()
    assert set(bench.taken(1)) == {stays}
