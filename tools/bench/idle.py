# SPDX-License-Identifier: MIT
"""How much of its time the GPU is idle while it decodes, how much of that between steps, and which kernels fill the
rest; by torch's profiler.

`python3 tools/bench/idle.py --shape qwen3-8b --batch 64`. Needs a GPU. The first steps, which prefill, are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = Path(__file__).resolve().parent / "shapes"
FIRST_KERNEL = "receive_kernel"
"""Of a captured decode step."""


def device_intervals(profile: Any) -> list[tuple[int, int, str]]:
    """(begin, end, name) in ns of everything that ran on the device, by begin."""
    from torch.profiler import DeviceType

    events = profile.profiler.kineto_results.events()
    found = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(found)


def idle_share(intervals: list[tuple[int, int, str]]) -> float:
    """The part of the span from the first begin to the last end that no interval covers."""
    busy, until = 0, intervals[0][0]
    for begin, end, _ in intervals:
        busy += max(0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (until - intervals[0][0])


def between_steps_share(intervals: list[tuple[int, int, str]], first_kernel: str) -> float:
    """The part of the span that lies idle right before a step's first kernel, copies to the device in between."""
    starts = [index for index, (_, _, name) in enumerate(intervals) if first_kernel in name and index]
    idle = 0
    for index in starts:
        before = index
        while before > 1 and "Memcpy" in intervals[before - 1][2]:
            before -= 1
        idle += sum(max(0, intervals[at][0] - intervals[at - 1][1]) for at in range(before, index + 1))
    return idle / (intervals[-1][1] - intervals[0][0])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from tokenspeed import Engine

    engine = Engine(
        str(SHAPES / arguments.shape),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=max(256, arguments.batch),
        max_model_len=4096,
    )
    random = np.random.default_rng(0)

    def generate(new_tokens: int) -> None:
        prompts = random.integers(10, 30_000, (arguments.batch, arguments.prompt)).tolist()
        engine.generate(prompts, {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True})

    generate(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(arguments.steps)
        torch.cuda.synchronize()
    engine.shutdown()
    intervals = device_intervals(profile)
    # The last half holds decode steps only, however long the prefill was.
    middle = (intervals[0][0] + intervals[-1][1]) // 2
    decode = [interval for interval in intervals if interval[0] >= middle]
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for begin, end, name in decode:
        spent[name[:90]] += end - begin
        calls[name[:90]] += 1
    span = decode[-1][1] - decode[0][0]
    return {
        "idle_share": idle_share(decode),
        "between_steps_share": between_steps_share(decode, FIRST_KERNEL),
        "span_ms": span / 1e6,
        "kernels": [(name, ns / span, calls[name], ns / calls[name] / 1e3) for name, ns in spent.most_common(16)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    idle, between = 100 * result["idle_share"], 100 * result["between_steps_share"]
    print(f"{arguments.shape}, {arguments.batch} rows: of {result['span_ms']:.1f} ms", end=" ")
    print(f"{idle:.2f} % idle, {between:.2f} % between steps")
    for name, share, count, microseconds in result["kernels"]:
        print(f"{100 * share:6.2f} %  {count:6d} x {microseconds:9.2f} us  {name}")


if __name__ == "__main__":
    main()
