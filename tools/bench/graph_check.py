# SPDX-License-Identifier: MIT
"""On a GPU: captured steps give the tokens of eager ones, prefill and decode, and nothing compiles after ready.

Sizes are captured for the very batches that run, so both sides call the same kernels on the same shapes and must agree
to the token. Exit status 1 when they do not.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = Path(__file__).resolve().parent / "shapes" / "qwen3-0.6b"
BATCH, PROMPT = 4, 200
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_k": 50, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {17: 2.0}},
    "reported": {"temperature": 0.7, "logprobs": 3},
}


def tokens(**options: Any) -> tuple[dict[str, list[list[int]]], int]:
    """Tokens by variant, and how many kernels were compiled late."""
    from tokenspeed import Engine

    random = np.random.default_rng(0)
    # Equal lengths: all end in the same step, so the batch never shrinks to a size without a graph.
    prompts = random.integers(10, 30_000, (BATCH, PROMPT)).tolist()
    engine = Engine(
        str(SHAPE),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=BATCH,
        max_model_len=1024,
        max_total_tokens=16384,
        enable_prefix_caching=False,
        **options,
    )
    found = {}
    for name, variant in VARIANTS.items():
        params = [{**variant, "seed": row, "max_new_tokens": 48, "ignore_eos": True} for row in range(BATCH)]
        found[name] = [output.token_ids for output in engine.generate(prompts, params)]
    late = engine.late_compiles
    engine.shutdown()
    gc.collect()
    return found, late


def main() -> int:
    eager, _ = tokens(enforce_eager=True)
    exact = {"prefill_graph_max_tokens": BATCH * PROMPT, "prefill_graph_capture_token_sizes": [BATCH * PROMPT]}
    played, late = tokens(cudagraph_capture_sizes=[BATCH], **exact)
    wrong = [name for name in VARIANTS if eager[name] != played[name]]
    for name in VARIANTS:
        print(f"{'WRONG' if name in wrong else 'ok':6}{name}: captured steps against eager ones")
    print(f"{late} kernels compiled after ready")
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
