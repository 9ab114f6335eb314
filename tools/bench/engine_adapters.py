# SPDX-License-Identifier: MIT
"""The engines that `engine.py` compares, behind one call: token ids in, greedy token ids out.

Each adapter starts its engine on random weights of a shape (a folder with config.json), or on a GGUF file where the
options name one, and brings its options to the engine's own names. Libraries are imported by the adapter that needs
them, so that a missing one concerns nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Batch:
    """Prompts, and how many tokens each is to give, whatever they are."""

    prompts: list[list[int]]
    new_tokens: list[int]


class Adapter(Protocol):
    name: str
    vocab_size: int

    def generate(self, batch: Batch) -> list[list[int]]:
        """Each prompt's new tokens; returns when the last one is there."""

    def counters(self) -> dict[str, float]:
        """What the engine counted about itself since it was ready."""

    def close(self) -> None:
        """Gives the device back, as far as the engine does."""


def vocab_size(shape: Path) -> int:
    return int(json.loads((shape / "config.json").read_text())["vocab_size"])


def gguf_of(options: Mapping[str, Any]) -> str:
    """The file that options["gguf"] names; "embedded" is the model that comes with the project."""
    if options["gguf"] != "embedded":
        return str(options["gguf"])
    from tokenspeed.config.model_source import embedded_model_path

    return str(embedded_model_path())


class TokenSpeed:
    """Ours."""

    name = "tokenspeed"

    def __init__(self, shape: Path, options: Mapping[str, Any], device: str | None) -> None:
        from tokenspeed import Engine

        mine = {key: value for key, value in options.items() if key != "gguf"}
        where = {"device": device} if device else {}
        if "gguf" not in options:
            where["load_format"] = "dummy"
        model = gguf_of(options) if "gguf" in options else str(shape)
        self.engine = Engine(model, skip_tokenizer_init=True, **where, **mine)
        self.vocab_size = self.engine.model_config.vocab_size

    def generate(self, batch: Batch) -> list[list[int]]:
        by_count = {
            count: {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in set(batch.new_tokens)
        }
        params = [by_count[count] for count in batch.new_tokens]
        return [output.token_ids for output in self.engine.generate(batch.prompts, params)]

    def counters(self) -> dict[str, float]:
        return {"late_compiles": float(self.engine.late_compiles)}

    def close(self) -> None:
        self.engine.shutdown()
        del self.engine


class Vllm:
    """vLLM's offline API."""

    name = "vllm"

    def __init__(self, shape: Path, options: Mapping[str, Any], device: str | None) -> None:
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

        names = {"max_num_seqs": "max_num_seqs", "max_model_len": "max_model_len"}
        mine = {names[key]: value for key, value in options.items() if key in names}
        self.vocab_size = vocab_size(shape)
        self.engine = LLM(
            str(shape), load_format="dummy", skip_tokenizer_init=True, max_num_batched_tokens=8192, **mine
        )

    def generate(self, batch: Batch) -> list[list[int]]:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]

        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in batch.new_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
        return [list(output.outputs[0].token_ids) for output in self.engine.generate(prompts, params, use_tqdm=False)]

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self.engine


class Transformers:
    """`generate` over one batch padded on the left."""

    name = "transformers"

    def __init__(self, shape: Path, options: Mapping[str, Any], device: str | None) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if where == "cpu" else torch.bfloat16
        self.vocab_size = vocab_size(shape)
        with torch.device(where):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=dtype).eval()

    def generate(self, batch: Batch) -> list[list[int]]:
        import torch

        longest, most = max(map(len, batch.prompts)), max(batch.new_tokens)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch.prompts])
        with torch.inference_mode():
            found = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[longest : longest + count] for row, count in zip(found.tolist(), batch.new_tokens)]

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self.model


def _llama_cpp(shape: Path, options: Mapping[str, Any], device: str | None) -> Adapter:
    from tools.bench.llama_adapter import LlamaCpp

    return LlamaCpp(shape, options, device)


ADAPTERS: dict[str, Callable[[Path, Mapping[str, Any], str | None], Adapter]] = {
    **{kind.name: kind for kind in (TokenSpeed, Vllm, Transformers)},
    "llama.cpp": _llama_cpp,
}
