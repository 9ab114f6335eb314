# SPDX-License-Identifier: MIT
"""Tokens per second of a whole `ts serve` on this CPU, beside `transformers` on the same weights in the same run.

Prints one table (or one JSON object with --json): start-up, then decode throughput for 1 and 16 streams, prefill
throughput, and the ratio to the peer. Both sides use the same number of threads, the same prompts, greedy decoding
and float32 activations. Machines are shared and drift: the ratios are the result, the absolute figures are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from tests.support.reference import load_reference
from tests.support.server import Server

PROMPT = "Write a long story about a lighthouse keeper and the sea."
LONG_PROMPT_TOKENS = 1024


def stream_tokens(base_url: str, max_tokens: int) -> tuple[float, int]:
    """One greedy stream: (seconds to the first token, tokens)."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    usage: dict[str, int] = {}
    started, first = time.perf_counter(), 0.0
    with httpx.stream("POST", base_url + "/v1/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - started
            usage = json.loads(line[6:]).get("usage") or usage
    return first, usage["completion_tokens"]


def served_decode(base_url: str, streams: int, max_tokens: int) -> float:
    """Generated tokens per second over `streams` concurrent streams, everything included."""
    started = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        counts = list(pool.map(lambda _: stream_tokens(base_url, max_tokens)[1], range(streams)))
    return sum(counts) / (time.perf_counter() - started)


def served_prefill(base_url: str, seed: int) -> float:
    """Prompt tokens per second of one cold prompt."""
    ids = torch.randint(1000, 40000, (LONG_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    started = time.perf_counter()
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0}
    httpx.post(base_url + "/v1/completions", json=body, timeout=600).raise_for_status()
    return LONG_PROMPT_TOKENS / (time.perf_counter() - started)


@torch.inference_mode()
def peer_decode(model: Any, streams: int, max_tokens: int) -> float:
    """Generated tokens per second of `generate` over one batch of `streams` equal rows."""
    ids = torch.randint(1000, 40000, (streams, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    started = time.perf_counter()
    model.generate(
        ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return streams * max_tokens / (time.perf_counter() - started)


@torch.inference_mode()
def peer_prefill(model: Any, seed: int) -> float:
    ids = torch.randint(1000, 40000, (1, LONG_PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    started = time.perf_counter()
    model(ids, logits_to_keep=1)
    return LONG_PROMPT_TOKENS / (time.perf_counter() - started)


def measure(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    model = load_reference(os.environ["TOKENSPEED_EMBEDDED_MODEL"])
    peer_decode(model, 1, 4)
    samples: dict[str, list[tuple[float, float]]] = {"decode_1": [], "decode_16": [], "prefill_1024": []}
    with Server("--num-threads", str(threads), "--max-model-len", "2048", "--max-num-seqs", "16") as server:
        ready_s = time.monotonic() - server.started_at
        served_decode(server.base_url, 1, 4)
        for turn in range(rounds):  # in turn, so that a slow moment of the machine meets both sides
            samples["decode_1"].append((served_decode(server.base_url, 1, 96), peer_decode(model, 1, 48)))
            samples["decode_16"].append((served_decode(server.base_url, 16, 64), peer_decode(model, 16, 16)))
            samples["prefill_1024"].append((served_prefill(server.base_url, turn), peer_prefill(model, turn)))
    result = {
        name: {
            "tokenspeed_tokens_per_s": statistics.median(ours for ours, _ in pairs),
            "transformers_tokens_per_s": statistics.median(peer for _, peer in pairs),
            "ratio": statistics.median(ours / peer for ours, peer in pairs),
        }
        for name, pairs in samples.items()
    }
    return {"start_up": {"ready_s": ready_s}, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.threads)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"start-up to ready: {result['start_up']['ready_s']:.1f} s")
    print(f"{'':14}{'tokenspeed':>12}{'transformers':>14}{'ratio':>8}")
    for name in ("decode_1", "decode_16", "prefill_1024"):
        row = result[name]
        print(
            f"{name:14}{row['tokenspeed_tokens_per_s']:>10.1f}/s{row['transformers_tokens_per_s']:>12.1f}/s"
            f"{row['ratio']:>7.2f}x"
        )


if __name__ == "__main__":
    main()
