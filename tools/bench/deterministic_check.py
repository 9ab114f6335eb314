# SPDX-License-Identifier: MIT
"""On a GPU: `--deterministic` gives a request the same tokens and log-probabilities, to the bit, alone and in a batch,
cold and from the prefix cache, in chunks of any size, captured and eager.

Also holds the dense products row by row: each alone against all together. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = Path(__file__).resolve().parent / "shapes"
PRODUCTS = ((4096, 6144), (4096, 4096), (12288, 4096), (4096, 24576), (1024, 3072), (1000, 333))
ROWS = (1, 2, 7, 16, 33, 64, 65, 100, 128, 200, 512, 513, 1000)
PROBES = 5
GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
DRAWN = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 5, "max_new_tokens": 40, "ignore_eos": True}
REPORTED = {**GREEDY, "logprobs": 3}

Answer = tuple[Any, ...]


def differing_products() -> Iterable[str]:
    """Products of which a row depends on how many others there are."""
    import torch

    from tokenspeed_kernel.registry import current_platform, solutions

    torch.manual_seed(0)
    fitting = [item for item in solutions("gemm.linear") if item.batch_invariant and torch.bfloat16 in item.dtypes]
    for item in fitting:
        if item.needs.device != "cuda" or item.needs.unmet(current_platform()):
            continue
        for inputs, outputs in PRODUCTS:
            call = {"weight_format": "bfloat16", "weight_layout": "rows", "inputs": inputs, "outputs": outputs}
            if item.misfit("cuda", torch.bfloat16, call):
                continue
            x = torch.randn(max(ROWS), inputs, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            whole = item.fn(x, weight, None)
            for rows in ROWS:
                if not torch.equal(item.fn(x[:rows], weight, None), whole[:rows]):
                    yield f"{item.name}, {rows} rows of {inputs} x {outputs}"


def answers(engine: Any, prompts: list[list[int]], params: dict[str, Any]) -> list[Answer]:
    """What each request got, in a form that compares exactly."""
    return [(output.token_ids, repr(output.logprobs)) for output in engine.generate(prompts, params)]


class Prompts:
    """Probes, those that share a batch with them, and what a second turn adds."""

    def __init__(self, most: int) -> None:
        random = np.random.default_rng(0)

        def ids(length: int) -> list[int]:
            return random.integers(10, 30_000, length).tolist()

        self.probes = [ids(length) for length in random.integers(20, most, PROBES).tolist()]
        self.others = [ids(length) for length in random.integers(5, most, 32 - PROBES).tolist()]
        self.turns = [ids(33) for _ in range(PROBES)]


def start(shape: str, **options: Any) -> Any:
    from tokenspeed import Engine

    return Engine(
        str(SHAPES / shape),
        load_format="dummy",
        skip_tokenizer_init=True,
        deterministic=True,
        max_num_seqs=48,
        max_model_len=8192,
        **options,
    )


def differences(shape: str, most: int) -> list[str]:
    """The ways to run a request that gave another answer than running it alone, cold, in a first engine."""
    prompts, wrong = Prompts(most), []
    expected: dict[str, list[Answer]] = {}

    def hold(name: str, got: list[Answer], want: list[Answer]) -> None:
        same = [left == right for left, right in zip(got, want, strict=True)]
        print(f"{'ok' if all(same) else 'WRONG':6}{shape}: {name} ({sum(same)} of {len(same)})", flush=True)
        if not all(same):
            wrong.append(name)

    kinds = {"greedy": GREEDY, "drawn": DRAWN, "reported": REPORTED}
    first = start(shape)
    for kind, params in kinds.items():
        first_time = [answers(first, [probe], params)[0] for probe in prompts.probes]
        expected[kind] = first_time
        hold(
            f"{kind}, alone again, from the cache", [answers(first, [p], params)[0] for p in prompts.probes], first_time
        )
        batch = answers(first, [*prompts.others[:10], *prompts.probes, *prompts.others[10:]], params)
        hold(f"{kind}, amid {len(prompts.others)} others", batch[10 : 10 + PROBES], first_time)
    second_turns = [p + a[0] + t for p, a, t in zip(prompts.probes, expected["greedy"], prompts.turns)]
    cached = answers(first, second_turns, REPORTED)
    print(f"{first.late_compiles} kernels compiled after ready", flush=True)
    if first.late_compiles:
        wrong.append("late compilations")
    first.shutdown()
    gc.collect()
    for name, options in (
        ("chunks of 192, eager", {"chunked_prefill_size": 192, "enforce_eager": True, "enable_prefix_caching": False}),
        ("layers in graphs, no cache", {"prefill_graph_max_tokens": 2048, "enable_prefix_caching": False}),
    ):
        other = start(shape, **options)
        for kind, params in kinds.items():
            hold(f"{kind}, {name}", answers(other, [*prompts.probes, *prompts.others], params)[:PROBES], expected[kind])
        hold(f"second turn on what was decoded, {name}", answers(other, second_turns, REPORTED), cached)
        other.shutdown()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--longest", type=int, default=1500, help="of the prompts, in tokens")
    arguments = parser.parse_args()
    wrong = list(differing_products())
    print(
        f"{'WRONG' if wrong else 'ok':6}products: {', '.join(wrong) or 'rows do not depend on each other'}", flush=True
    )
    wrong += differences(arguments.shape, arguments.longest)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
