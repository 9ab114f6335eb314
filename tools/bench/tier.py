# SPDX-License-Identifier: MIT
"""Agent sessions that a device pool cannot hold all at once, with a host tier and without, turn by turn in one run.

Every session has a prompt of its own that grows with each turn; sessions take turns, so that each has been driven off
the device when its next turn comes. Prints, for either engine, the time of a later turn, how much of it was cached and
whether the tokens are the same; exit status 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from tokenspeed import Engine

BLOCK_SIZE = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the embedded one when not given")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first-tokens", type=int, default=512)
    parser.add_argument("--turn-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--held-sessions", type=int, default=2, help="how many the device has room for")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kvstore-io-backend", default="kernel", choices=("kernel", "direct"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def engine(options: argparse.Namespace, ratio: float) -> Engine:
    longest = options.first_tokens + options.turns * (options.turn_tokens + options.output_tokens)
    per_session = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    more = {} if options.num_threads is None else {"num_threads": options.num_threads}
    return Engine(
        options.model,
        device=options.device,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        deterministic=options.device != "cpu",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_model_len=per_session + BLOCK_SIZE,
        max_total_tokens=per_session * options.held_sessions + BLOCK_SIZE,
        kvstore_ratio=ratio,
        kvstore_io_backend=options.kvstore_io_backend,
        log_level="error",
        **more,
    )


def tokens(session: int, turn: int, count: int) -> list[int]:
    """What a session is told in a turn."""
    return [(7919 * (session + 1) * (step + 1) + 104729 * turn) % 30000 + 100 for step in range(count)]


def run(options: argparse.Namespace) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": options.output_tokens, "ignore_eos": True}
    engines = {"device only": engine(options, 0.0), "host tier": engine(options, 2.0 * options.sessions)}
    histories = [tokens(session, 0, options.first_tokens) for session in range(options.sessions)]
    wall_s: dict[str, list[float]] = {name: [] for name in engines}
    cpu_s: dict[str, list[float]] = {name: [] for name in engines}
    shares: dict[str, list[float]] = {name: [] for name in engines}
    same = True
    for turn in range(options.turns):
        for session, history in enumerate(histories):
            answers = []
            for name, served in engines.items():
                started_s, cpu_started_s = time.perf_counter(), time.process_time()
                output = served.generate([history], params)[0]
                if turn:
                    wall_s[name].append(time.perf_counter() - started_s)
                    cpu_s[name].append(time.process_time() - cpu_started_s)
                    shares[name].append(output.cached_tokens / len(history))
                answers.append(output.token_ids)
            same = same and answers[0] == answers[1]
            histories[session] = history + answers[0] + tokens(session, turn + 1, options.turn_tokens)
    for served in engines.values():
        served.shutdown()
    return {
        "same tokens": same,
        **{
            name: {
                "ms a later turn": round(1e3 * statistics.median(wall_s[name]), 1),
                "ms of processor time": round(1e3 * statistics.median(cpu_s[name]), 1),
                "share cached": round(statistics.mean(shares[name]), 3),
            }
            for name in engines
        },
    }


def main() -> int:
    options = arguments()
    found = run(options)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    return 0 if found["same tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
