# SPDX-License-Identifier: MIT
"""The engine on a tiny DeepSeek: one cache tensor a layer, sized by its own bytes, and the same bits cold or warm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config.flags import FlagError
from tokenspeed.engine.offline import Engine
from tokenspeed.engine.testing import LATENT_CONFIG

StartEngine = Callable[..., Engine]

TOKEN_BYTES = 3 * (32 + 16) * 4
PROMPTS = [[(7 * start + 3 * step) % 317 + 3 for step in range(9 + 50 * start)] for start in range(5)]
DRAWN = {"temperature": 1.3, "seed": 11, "max_new_tokens": 12, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In the place of the folder's own, for `start_engine`."""
    folder: Path = tmp_path_factory.mktemp("tiny-deepseek")
    (folder / "config.json").write_text(json.dumps(LATENT_CONFIG))
    return str(folder)


def answers(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Tokens with their log-probabilities, to the bit."""
    return [(output.token_ids, output.logprobs) for output in engine.generate(prompts, DRAWN)]


@pytest.fixture
def expected(start_engine: StartEngine) -> list[Any]:
    """Of each prompt alone, cold, whole."""
    engine = start_engine(enable_prefix_caching=False, chunked_prefill_size=-1)
    return [answers(engine, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 8, "chunked_prefill_size": 33},
        {"block_size": 256, "overlap_depth": 0},
        # A pool that cannot hold all requests at once: some wait or are retracted, and resume exactly.
        {"max_total_tokens": 384},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_batch_cache_chunks_or_blocks(
    start_engine: StartEngine, expected: list[Any], options: dict[str, Any]
) -> None:
    engine = start_engine(**options)
    assert answers(engine, PROMPTS) == expected
    assert answers(engine, PROMPTS) == expected, "warm as cold"


def test_choices_that_share_a_partial_block_get_copies_of_it(start_engine: StartEngine, expected: list[Any]) -> None:
    engine = start_engine(block_size=64)
    many = engine.generate([PROMPTS[2]], {**DRAWN, "n": 4})[0]
    assert len({tuple(choice.token_ids) for choice in many.choices}) == 4
    assert answers(engine, PROMPTS)[2] == expected[2], "and nobody wrote into another's"


def test_the_pool_counts_the_bytes_of_latents(start_engine: StartEngine) -> None:
    num_blocks = 50
    gib = num_blocks * 16 * TOKEN_BYTES / 2**30
    engine = start_engine(max_total_tokens=None, kv_cache_gib=gib * 1.001)
    assert engine._core is not None
    assert engine._core.num_blocks == num_blocks + 1, "and block 0, which is never handed out"


def test_latents_in_fp8_take_a_quarter_and_answer_the_same_cold_or_warm(start_engine: StartEngine) -> None:
    gib = 50 * 16 * TOKEN_BYTES / 4 / 2**30
    engine = start_engine(max_total_tokens=None, kv_cache_gib=gib * 1.001, kv_cache_dtype="fp8_e4m3")
    assert engine.load().total_blocks == 50
    alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
    assert answers(engine, PROMPTS) == alone


def test_scales_of_heads_that_are_not_there_are_refused_by_flag(start_engine: StartEngine) -> None:
    with pytest.raises(FlagError, match=r"--kv-cache-quant-method: per_token_head: Deepseek\w+ caches no heads"):
        start_engine(kv_cache_dtype="fp8_e4m3", kv_cache_quant_method="per_token_head")
