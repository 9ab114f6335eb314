# SPDX-License-Identifier: MIT
"""`token_ids_logprob`: logprobs of tokens that a request names, the same bits as where they are drawn or likeliest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.config.sampling import MAX_CHOSEN_LOGPROBS, RequestError
from tokenspeed.engine.choice import TokenLogprob
from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]

PROMPT = [number * 13 % 300 for number in range(45)]
CHOSEN = [7, 300, 7, 0]
"""One of them twice."""
PARAMS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "logprobs": 2}


def scores(engine: Engine, **changes: Any) -> list[TokenLogprob]:
    found = engine.generate([PROMPT], PARAMS | changes)[0].logprobs
    assert found is not None
    return found


def test_every_position_tells_the_named_tokens_beside_the_likeliest(start_engine: StartEngine) -> None:
    engine = start_engine(max_num_seqs=4)
    plain = scores(engine)
    # The likeliest tokens, by name: what they are worth is known.
    for position, entry in enumerate(plain):
        named = [token for token, _ in entry.top]
        told = scores(engine, token_ids_logprob=named)[position]
        assert told.top == entry.top and told.chosen == entry.top
    chosen = scores(engine, token_ids_logprob=CHOSEN, logprobs=0)
    assert [entry.logprob for entry in chosen] == [entry.logprob for entry in plain]
    for entry in chosen:
        assert entry.top == () and [token for token, _ in entry.chosen] == CHOSEN
        assert entry.chosen[0] == entry.chosen[2] and all(value < 0 for _, value in entry.chosen)


@pytest.mark.parametrize(
    "options",
    [{"overlap_depth": 0}, {"chunked_prefill_size": 16, "input_logprob_chunk_tokens": 7}, {"max_total_tokens": 160}],
    ids=str,
)
def test_they_do_not_depend_on_the_batch_or_the_steps(start_engine: StartEngine, options: dict[str, Any]) -> None:
    asked = PARAMS | {"token_ids_logprob": CHOSEN, "prompt_logprobs": 1}
    alone = start_engine(max_num_seqs=4).generate([PROMPT], asked)[0]
    others = [{**PARAMS, "logprobs": None}, {**PARAMS, "token_ids_logprob": [9]}, {**PARAMS, "logprobs": 5}]
    engine = start_engine(max_num_seqs=4, **options)
    prompts = [PROMPT[:20], PROMPT, PROMPT[5:], PROMPT[9:30]]
    told = engine.generate(prompts, [others[0], asked, others[1], others[2]])
    assert told[1].logprobs == alone.logprobs and told[1].prompt_logprobs == alone.prompt_logprobs
    assert told[0].logprobs is None
    for output, named in ((told[2], [9]), (told[3], [])):
        assert output.logprobs is not None
        assert all([token for token, _ in entry.chosen] == named for entry in output.logprobs)


def test_a_prompt_tells_them_at_the_positions_that_it_is_asked_for(start_engine: StartEngine) -> None:
    engine = start_engine(max_num_seqs=4)
    asked = PARAMS | {"prompt_logprobs": 1, "token_ids_logprob": CHOSEN}
    whole = engine.generate([PROMPT], asked)[0].prompt_logprobs
    later = engine.generate([PROMPT], asked | {"prompt_logprob_start": 40})[0].prompt_logprobs
    assert whole is not None and whole[0] is None and later == whole[40:]
    for entry in whole[1:]:
        assert entry is not None and len(entry.top) == 1 and [token for token, _ in entry.chosen] == CHOSEN
    # Position p's scores are those of the token that would come there.
    generated = engine.generate([PROMPT[:20]], {**PARAMS, "max_new_tokens": 1, "token_ids_logprob": CHOSEN})[0]
    assert generated.logprobs is not None and whole[20] is not None
    assert generated.logprobs[0].chosen == whole[20].chosen


def test_pieces_of_a_stream_and_several_choices_have_them_all(start_engine: StartEngine) -> None:
    engine = start_engine(max_num_seqs=4)
    expected = scores(engine, token_ids_logprob=CHOSEN)
    assert scores(engine, token_ids_logprob=CHOSEN, stream_interval=4) == expected
    drawn = {**PARAMS, "temperature": 1.0, "seed": 3, "token_ids_logprob": CHOSEN, "n": 2}
    for choice in engine.generate([PROMPT], drawn)[0].choices:
        assert choice.logprobs is not None and all(len(entry.chosen) == 4 for entry in choice.logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids_logprob": [-1]},
        {"token_ids_logprob": [10**6]},
        {"token_ids_logprob": ["a"]},
        {"token_ids_logprob": [True]},
        {"token_ids_logprob": [0] * (MAX_CHOSEN_LOGPROBS + 1)},
        {"token_ids_logprob": [1], "logprobs": None},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_makes_no_sense_is_refused_by_name(start_engine: StartEngine, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        start_engine(max_num_seqs=4).generate([PROMPT], PARAMS | changes)
    assert refused.value.field == "token_ids_logprob"
