# SPDX-License-Identifier: MIT
"""--enable-nan-detection: a request whose logits are no numbers ends with a numerical error; nobody else notices."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.engine.offline import Engine

StartEngine = Callable[..., Engine]
POISON = 7
COUNTER = "tokenspeed:num_nan_aborted_requests_total"
PARAMS = {"temperature": 0.8, "seed": 4, "max_new_tokens": 12, "ignore_eos": True, "bad_token_ids": [[POISON]]}


@pytest.fixture(scope="module")
def poisoned(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose embedding of one token is NaN."""
    folder: Path = tmp_path_factory.mktemp("poisoned")
    config = json.loads((Path(tiny_model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    draw = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens": (320, 64), "lm_head": (320, 64), "model.norm": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj": (64, 64) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj": (32, 64) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj": (128, 64) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj": (64, 128)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_with_nan_ends_with_an_error_and_its_neighbours_and_successors_do_not_notice(
    start_engine: StartEngine, poisoned: str, depth: int
) -> None:
    options: dict[str, Any] = {"model": poisoned, "load_format": "auto", "overlap_depth": depth}
    options |= {"enable_nan_detection": True, "metrics_port": 0}
    engine = start_engine(**options)
    good = [[5, 9, 100 + index] for index in range(3)]
    bad = [[*range(20, 60), POISON, *range(40)]] * 2
    expected = [output.token_ids for output in start_engine(**options).generate(good, PARAMS)]
    for _ in range(2):
        outputs = engine.generate([good[0], bad[0], good[1], bad[1], good[2]], PARAMS)
        assert [output.token_ids for output in outputs[::2]] == expected
        for output in outputs[1::2]:
            assert (output.token_ids, output.finish_reason) == ([], "abort")
            assert "numerical_error" in (output.choices[0].error or "")
    deadline_s = time.monotonic() + 10
    while engine.load().active_blocks:  # until the step behind the last end has settled
        assert time.monotonic() < deadline_s
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.ports.metrics_port}/metrics", timeout=10) as response:
        (line,) = (line for line in response.read().decode().splitlines() if line.startswith(COUNTER))
    assert line.endswith(" 4.0")


def test_without_the_flag_nobody_looks(start_engine: StartEngine, poisoned: str) -> None:
    output = start_engine(model=poisoned, load_format="auto").generate([[POISON]], PARAMS)[0]
    assert output.finish_reason == "length" and output.choices[0].error is None
