# SPDX-License-Identifier: MIT
"""Time to the first token through HTTP, and how much of it is the engine's own.

A whole `ts serve` of a tiny random model, so that what is around the engine shows; the same requests by three clocks:
the client's (request sent to first event), the gateway's `smg_router_ttft_seconds` (head read to first token) and the
engine's `tokenspeed:time_to_first_token_seconds` (request taken off the lane to first token).

`python3 tools/bench/first_token.py [--streams 1 16] [--requests N] [--json]` prints, per number of streams, means in
milliseconds: {streams: {client_ms, gateway_ms, engine_ms, added_ms}}; added_ms is the client's less the engine's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.server import Server
from tools.bench.gateway_engine import write_model
from tools.bench.gateway_load import Ask

HERE = Path(__file__).resolve().parent
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_NEW_TOKENS, _PROMPT_WORDS = 4, 60
_GATEWAYS, _ENGINES = "smg_router_ttft_seconds", "tokenspeed:time_to_first_token_seconds"
Numbers = dict[str, float]


def write_tiny_model(folder: Path, text: str) -> None:
    """A Llama whose layers take little time, with a tokenizer learnt from `text`."""
    write_model(folder, text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **_SHAPE}))


class Totals:
    """Sum and count of a histogram over all its series, from the text of a /metrics."""

    def __init__(self, url: str, name: str) -> None:
        with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
        self.seconds, self.count = (
            sum(float(value) for value in re.findall(rf"^{name}_{what}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
            for what in ("sum", "count")
        )

    def mean_ms(self, before: Totals) -> float:
        """Of what was observed since `before`. Raises ZeroDivisionError when nothing was."""
        return (self.seconds - before.seconds) / (self.count - before.count) * 1e3


def ask(connection: http.client.HTTPConnection, body: bytes) -> float:
    """Seconds from a streamed request to the first of its events; the answer is read to its end."""
    begun_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    took_s = time.perf_counter() - begun_s
    if answer.status != 200 or not (first + answer.read()).endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"an answer with status {answer.status} begins with {first[:200]!r}")
    return took_s


def measure(server: Server, text: str, streams: int, requests: int, seed: int) -> Numbers:
    """`requests` requests over `streams` connections. seed: another one asks with other prompts."""
    control = f"http://127.0.0.1:{server.control_port}"
    kind = Ask("", _PROMPT_WORDS, _NEW_TOKENS, stream=True)
    before = Totals(server.base_url, _GATEWAYS), Totals(control, _ENGINES)

    def client(number: int) -> list[float]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        bodies = [json.loads(kind.body(seed + n, text)) for n in range(number, requests, streams)]
        for body in bodies:
            del body["model"]  # whatever is served
        times_s = [ask(connection, json.dumps(body).encode()) for body in bodies]
        connection.close()
        return times_s

    with ThreadPoolExecutor(streams) as pool:
        times_s = [time_s for some in pool.map(client, range(streams)) for time_s in some]
    gateway_ms = Totals(server.base_url, _GATEWAYS).mean_ms(before[0])
    engine_ms = Totals(control, _ENGINES).mean_ms(before[1])
    client_ms = sum(times_s) / len(times_s) * 1e3
    numbers = {"client_ms": client_ms, "gateway_ms": gateway_ms, "engine_ms": engine_ms}
    return {name: round(value, 2) for name, value in {**numbers, "added_ms": client_ms - engine_ms}.items()}


def bench(streams: list[int], requests: int) -> dict[str, Numbers]:
    """{streams: numbers} of one server."""
    text = (HERE.parents[1] / "tests/perplexity/conversation.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="first-token-") as name:
        write_tiny_model(Path(name), text)
        flags = ["--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "64", "--max-total-tokens", "65536"]
        with Server(*flags, model=name) as server:
            measure(server, text, max(streams), 2 * max(streams), 10**6)
            return {str(number): measure(server, text, number, requests, number * 1000) for number in streams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=320, help="for each number of streams")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = bench(arguments.streams, arguments.requests)
    if arguments.json:
        print(json.dumps(results))
        return
    for streams, numbers in results.items():
        print(f"{streams:>4} streams: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
