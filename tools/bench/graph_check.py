# SPDX-License-Identifier: MIT
"""On a GPU: captured steps give the tokens of eager ones, prefill and decode, and nothing compiles after ready.

Sizes are captured for the very batches that run, so both sides call the same kernels on the same shapes and must agree
to the token. `graph_check.py [MODEL]...`, by default all of MODELS. Exit status 1 when they do not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed_kernel.attention import cuda_paged

SHAPES = Path(__file__).resolve().parent / "shapes"
BATCH, PROMPT, LONGEST = 4, 200, 1024
SHARED = 512
"""Tokens that prompts begin with where prefixes are cached: rows that decode read them together."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-0.6b", {}),
    "dense, a shared prompt": ("qwen3-0.6b", {"enable_prefix_caching": True}),
    "dense, fp8 weights": ("qwen3-0.6b", {"quantization": "fp8"}),
    "dense, fp8 cache": ("qwen3-0.6b", {"kv_cache_dtype": "fp8_e4m3"}),
    "experts": ("qwen3-moe-small", {}),
    "latent attention": ("deepseek-small", {}),
    "latent attention, 128 heads": ("deepseek-small", {"hf_overrides": '{"num_attention_heads": 128}'}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_k": 50, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {17: 2.0}},
    "reported": {"temperature": 0.7, "logprobs": 3},
    "masked": {
        "temperature": 0.0,
        "allowed_token_ids": tuple(range(100, 9000, 3)),
        "bad_token_ids": ((103,), (106, 109)),
    },
    "processed": {"temperature": 0.0, "logits_processor": lambda ids, logits: logits * (1 + len(ids) % 3) * -1.0},
}


class Runs:
    """What one engine gave: tokens by variant, kernels compiled late, bytes of GPU memory that it did not give back."""

    def __init__(self, shape: str, **options: Any) -> None:
        import torch

        from tokenspeed import Engine

        random = np.random.default_rng(0)
        free = torch.cuda.mem_get_info()[0]
        # Equal lengths: all end in the same step, so the batch never shrinks to a size without a graph. Other prompts
        # for each variant: what is cached of the last one's would leave steps of other sizes.
        prompts = random.integers(10, 30_000, (len(VARIANTS), BATCH, PROMPT)).tolist()
        shared = random.integers(10, 30_000, SHARED).tolist() if options.get("enable_prefix_caching") else []
        engine = Engine(
            str(SHAPES / shape),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_custom_logit_processor=True,
            max_num_seqs=BATCH,
            max_model_len=LONGEST,
            max_total_tokens=16384,
            **{"enable_prefix_caching": False, **options},
        )
        if shared:
            engine.generate([shared], {"max_new_tokens": 1})
            prompts = [[shared + prompt for prompt in batch] for batch in prompts]
        self.tokens: dict[str, list[list[int]]] = {}
        for (name, variant), batch in zip(VARIANTS.items(), prompts, strict=True):
            params = [{**variant, "seed": row, "max_new_tokens": 48, "ignore_eos": True} for row in range(BATCH)]
            self.tokens[name] = [output.token_ids for output in engine.generate(batch, params)]
        self.late = engine.late_compiles
        engine.shutdown()
        self.kept = free - torch.cuda.mem_get_info()[0]


def differences(name: str) -> int:
    """How much is wrong with one of MODELS; says what."""
    shape, options = MODELS[name]
    cuda_paged.LEAST_SAVED = 1  # or so few rows would read what they share apart
    eager = Runs(shape, enforce_eager=True, **options)
    exact = {"prefill_graph_max_tokens": BATCH * PROMPT, "prefill_graph_capture_token_sizes": [BATCH * PROMPT]}
    played = Runs(shape, cudagraph_capture_sizes=[BATCH], **exact, **options)
    wrong = [variant for variant in VARIANTS if eager.tokens[variant] != played.tokens[variant]]
    for variant in VARIANTS:
        print(f"{'WRONG' if variant in wrong else 'ok':6}{name}, {variant}: captured steps against eager ones")
    if any(token % 3 != 1 for row in played.tokens["masked"] for token in row):
        wrong.append("masked")
        print(f"WRONG {name}: a masked row gave a token that is not allowed")
    print(f"{name}: {played.late} kernels compiled after ready, {played.kept / 2**20:.0f} MiB kept", flush=True)
    return len(wrong) + played.late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="; ".join(MODELS))
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(MODELS)
    if unknown:
        parser.error(f"no model {sorted(unknown)[0]!r}; there are: {'; '.join(MODELS)}")
    return 1 if sum(differences(name) for name in arguments.models or MODELS) else 0


if __name__ == "__main__":
    sys.exit(main())
