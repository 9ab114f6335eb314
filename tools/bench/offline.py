# SPDX-License-Identifier: MIT
"""Tokens per second of the in-process `Engine` on a real-shaped model with random weights, beside `transformers`.

Speed does not depend on the values of the weights, so a config.json is enough (`shapes/`). Both sides run in one
process, in turn, on the same device and dtype. Prints a table, or one JSON object with --json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tokenspeed import Engine

SHAPES = Path(__file__).parent / "shapes"
PROMPT_TOKENS = 128


def prompts(count: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def ours(engine: Engine, batch: int, new_tokens: int, seed: int) -> float:
    """Generated tokens per second of `batch` requests, prefill included."""
    ids = prompts(batch, PROMPT_TOKENS, seed, engine.model_config.vocab_size)
    started = time.perf_counter()
    outputs = engine.generate(ids, {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True})
    elapsed_s = time.perf_counter() - started
    assert all(len(output.token_ids) == new_tokens for output in outputs)
    return batch * new_tokens / elapsed_s


def ours_prefill(engine: Engine, length: int, seed: int) -> float:
    ids = prompts(1, length, seed, engine.model_config.vocab_size)
    started = time.perf_counter()
    engine.generate(ids, {"temperature": 0.0, "max_new_tokens": 1})
    return length / (time.perf_counter() - started)


@torch.inference_mode()
def peer(model: Any, batch: int, new_tokens: int, seed: int) -> float:
    """The same by `transformers`' generate over one padded batch."""
    ids = torch.tensor(prompts(batch, PROMPT_TOKENS, seed, model.config.vocab_size), device=model.device)
    started = time.perf_counter()
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    result.cpu()  # waits for the device
    return batch * new_tokens / (time.perf_counter() - started)


@torch.inference_mode()
def peer_prefill(model: Any, length: int, seed: int) -> float:
    ids = torch.tensor(prompts(1, length, seed, model.config.vocab_size), device=model.device)
    started = time.perf_counter()
    model(ids, logits_to_keep=1).logits.cpu()
    return length / (time.perf_counter() - started)


def load_peer(shape: Path, device: str, dtype: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=getattr(torch, dtype))
    return model.eval()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES / arguments.shape
    started = time.perf_counter()
    engine = Engine(
        str(shape),
        load_format="dummy",
        device=arguments.device,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=max(arguments.batches),
        max_model_len=8192,
        gpu_memory_utilization=0.5,
    )
    start_up_s = time.perf_counter() - started
    model = load_peer(shape, arguments.device, arguments.dtype)
    rows: dict[str, list[tuple[float, float]]] = {}
    for turn in range(arguments.rounds + 1):  # the first turn warms both sides up
        for batch in arguments.batches:
            pair = (ours(engine, batch, arguments.new_tokens, turn), peer(model, batch, arguments.new_tokens, turn))
            rows.setdefault(f"decode_{batch}", []).append(pair)
        length = arguments.prefill
        rows.setdefault(f"prefill_{length}", []).append(
            (ours_prefill(engine, length, 100 + turn), peer_prefill(model, length, 100 + turn))
        )
    engine.shutdown()
    result: dict[str, Any] = {"shape": arguments.shape, "device": arguments.device, "start_up_s": start_up_s}
    for name, pairs in rows.items():
        result[name] = {
            "tokenspeed_tokens_per_s": statistics.median(mine for mine, _ in pairs[1:]),
            "transformers_tokens_per_s": statistics.median(theirs for _, theirs in pairs[1:]),
            "ratio": statistics.median(mine / theirs for mine, theirs in pairs[1:]),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(p.name for p in SHAPES.iterdir()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['shape']} on {result['device']}, start-up {result['start_up_s']:.1f} s")
    print(f"{'':14}{'tokenspeed':>13}{'transformers':>15}{'ratio':>8}")
    for name, row in result.items():
        if isinstance(row, dict):
            print(
                f"{name:14}{row['tokenspeed_tokens_per_s']:>11.0f}/s{row['transformers_tokens_per_s']:>13.0f}/s"
                f"{row['ratio']:>7.2f}x"
            )


if __name__ == "__main__":
    main()
