# SPDX-License-Identifier: MIT
"""Runs every path that traffic can reach once before the engine says that it is ready.

Real requests go through the real loop: a lone prompt, a full batch, a prompt of several chunks, each sampling
transform, logprobs. Kernels load, JIT compilers compile, memory pools grow; afterwards the prefix cache is flushed.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from tokenspeed.config.resolve import Config
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.errors import EngineFault
from tokenspeed.engine.local_frontend import Delta, LocalFrontend
from tokenspeed.engine.loop import EngineLoop
from tokenspeed.engine.messages import Add
from tokenspeed.sampling import NUMERICAL_ERROR

logger = logging.getLogger("tokenspeed.engine")

_MAX_STEPS = 10_000

_VARIANTS = (
    SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_new_tokens=2, ignore_eos=True),
    SamplingParams(
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 0.5},
        bad_token_ids=((1,),),
        logprobs=5,
        seed=1,
        max_new_tokens=2,
        ignore_eos=True,
    ),
)


def warm_up(loop: EngineLoop, config: Config) -> None:
    """Raises EngineFault when a request does not come back whole."""
    started_s = time.monotonic()
    limits = config.scheduler
    # A prompt that the context and the pool have room for, with its two tokens of output.
    longest = min(limits.max_model_len, loop.scheduler.load().total_blocks * limits.block_size) - 3
    loop.log.muted = True
    _run(loop, config, [min(12, longest)], _VARIANTS[:1])
    if config.device.device != "cpu":
        # Compiled kernels specialise on batch sizes and lengths; the CPU's are compiled already.
        chunk = min(limits.max_batched_tokens, longest)
        for batch in (2, 8, min(limits.max_num_seqs, 17)):
            _run(loop, config, [min(5 + 3 * index, longest) for index in range(batch)], _VARIANTS)
        _run(loop, config, [chunk, min(chunk + 1, longest)], _VARIANTS)
    else:
        _run(loop, config, [min(20 + index, longest) for index in range(min(3, limits.max_num_seqs))], _VARIANTS)
    if not loop.flush_cache():
        raise EngineFault("warm-up left blocks held")
    loop.set_weight_version(0)  # from here on the store may keep what is computed
    loop.log.muted = False
    logger.debug("warm-up took %.2f s", time.monotonic() - started_s)


def _run(loop: EngineLoop, config: Config, lengths: list[int], variants: tuple[SamplingParams, ...]) -> None:
    frontend = LocalFrontend()
    ended: dict[str, str] = {}

    def collect(deltas: object) -> None:
        assert isinstance(deltas, list)
        for delta in deltas:
            assert isinstance(delta, Delta)
            if delta.finish:
                ended[delta.rid] = delta.rejection.message if delta.rejection else delta.finish

    vocab = config.admission.vocab_size
    requests = [
        Add(
            f"warm-up-{index}", np.arange(length, dtype=np.int32) * 7 % vocab, variants[index % len(variants)], 0, index
        )
        for index, length in enumerate(lengths)
    ]
    before, loop.frontend = loop.frontend, frontend
    try:
        frontend.submit(requests, collect)
        for _ in range(_MAX_STEPS):
            if len(ended) == len(requests):
                break
            loop.step()
        loop.settle_all()
    finally:
        loop.frontend = before
    # Made-up tokens may overflow a model that is served well enough.
    wrong = {rid: why for rid, why in ended.items() if why not in ("length", NUMERICAL_ERROR.message)}
    if wrong or len(ended) != len(requests):
        raise EngineFault(f"warm-up requests did not finish: {wrong or 'no end in sight'}")
