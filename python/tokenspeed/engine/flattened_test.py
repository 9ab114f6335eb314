# SPDX-License-Identifier: MIT
"""Weight updates as SGLang's trainers send them: many tensors in one row of bytes, and requests that end with them."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.support.processes import wait_until
from tokenspeed.engine.errors import OperationError
from tokenspeed.engine.flattened import unflattened
from tokenspeed.engine.testing import StartEngine, answer_of, ask, checkpoint, start

UPDATE = "/update_weights_from_tensor"
TENSORS = {
    "odd": torch.arange(3, dtype=torch.int8),
    "wide": torch.randn(2, 3),
    "half": torch.randn(5).bfloat16(),
    "one": torch.tensor(7.0),
    "none": torch.empty(0, 4),
}


@dataclass
class Metadata:
    """As trainers have it: an object an entry."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


def bucket(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Metadata]]:
    parts, entries, start = [], [], 0
    for name, tensor in tensors.items():
        parts.append(tensor.reshape(-1).view(torch.uint8))
        entries.append(Metadata(name, tensor.shape, tensor.dtype, start, start + len(parts[-1])))
        start += len(parts[-1])
    return torch.cat(parts), entries


def plain(entries: list[Metadata]) -> list[dict[str, Any]]:
    return [vars(entry) | {"shape": list(entry.shape), "dtype": str(entry.dtype)} for entry in entries]


def sent(tensors: dict[str, torch.Tensor]) -> str:
    row, entries = bucket(tensors)
    data = save({"flattened_tensor": row}, {"metadata": json.dumps(plain(entries))})
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("as_objects", [True, False])
def test_what_is_in_a_row_comes_out_of_it(as_objects: bool) -> None:
    row, entries = bucket(TENSORS)
    found = unflattened({"flattened_tensor": row}, entries if as_objects else plain(entries))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    # Older trainers have a row of the tensors' own dtype, and count its elements.
    own = unflattened({"flattened_tensor": torch.arange(6.0)}, [Metadata("a", torch.Size([2, 2]), torch.float32, 2, 6)])
    assert torch.equal(own["a"], torch.tensor([[2.0, 3.0], [4.0, 5.0]]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": ""}, "metadata[0]: name"),
        ({"shape": [4]}, "not its shape's"),
        ({"shape": "3"}, "metadata[0].shape"),
        ({"dtype": "torch.nothing"}, "metadata[0].dtype"),
        ({"start_idx": -1}, "start_idx"),
        ({"end_idx": 10**9}, "end_idx"),
        ({"end_idx": None}, "end_idx"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(change: dict[str, Any], why: str) -> None:
    row, entries = bucket(TENSORS)
    listed = plain(entries)
    listed[0] |= change
    with pytest.raises(OperationError) as refused:
        unflattened({"flattened_tensor": row}, listed)
    assert why in str(refused.value)


def test_a_bucket_is_served_as_the_tensors_in_it(start_engine: StartEngine, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    expected = answer_of(start_engine(model=new, load_format="auto"))
    engine = start(start_engine, model=old, load_format="auto")
    before, tensors = answer_of(engine), load_file(f"{new}/model.safetensors")
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[i::2]} for i in (0, 1)]
    body = {"serialized_named_tensors": list(map(sent, parts)), "load_format": "flattened_bucket"}
    status, answer = ask(engine, UPDATE, body | {"weight_version": "v2"})
    assert (status, answer.get("weight_version")) == (200, "v2"), answer
    assert answer_of(engine) == expected
    assert ask(engine, "/update_weights_from_disk", {"model_path": old})[0] == 200
    assert answer_of(engine) == before
    row, entries = bucket(tensors)
    held = {"flattened_tensor": row, "metadata": entries}
    engine.update_weights_from_tensor(held, load_format="flattened_bucket")
    assert answer_of(engine) == expected
    wrong = base64.b64encode(save({"flattened_tensor": row})).decode()
    for sends, load_format, why in (([wrong], "flattened_bucket", "metadata"), (list(map(sent, parts)), "x", "'x'")):
        status, answer = ask(engine, UPDATE, {"serialized_named_tensors": sends, "load_format": load_format})
        assert status == 400 and why in answer["message"], answer


@pytest.mark.parametrize("flush", [False, True])
def test_requests_end_with_an_update_that_is_asked_to_abort_them(
    start_engine: StartEngine, tmp_path: Path, flush: bool
) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    engine = start(start_engine, model=old, load_format="auto")
    reasons: list[str | None] = []

    def run() -> None:
        params = {"temperature": 0.0, "max_new_tokens": 900, "ignore_eos": True}
        reasons.extend(output.finish_reason for output in engine.generate([[5, 6, 7]] * 2, params))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: engine.load().num_running == 2)
    body = {"model_path": str(tmp_path / "nowhere"), "abort_all_requests": True}
    assert ask(engine, "/update_weights_from_disk", body)[0] == 400
    assert engine.load().num_running == 2  # what is refused ends nobody
    body = {"model_path": new, "abort_all_requests": True, "flush_cache": flush, "weight_version": "v2"}
    status, answer = ask(engine, "/update_weights_from_disk", body)
    assert status == 200, answer
    thread.join(60)
    assert reasons == ["abort"] * 2 and engine.weight_version == "v2"
    assert ask(engine, "/update_weights_from_disk", {"model_path": new, "abort_all_requests": 1})[0] == 400
