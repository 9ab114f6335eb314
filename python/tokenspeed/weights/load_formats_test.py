# SPDX-License-Identifier: MIT
"""Load formats: the same tensors out of every kind of file, and one line that names the file when it is damaged."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import ModelSource
from tokenspeed.weights import WeightReader
from tokenspeed.weights.dummy_reader import DummyReader
from tokenspeed.weights.folder_reader import FolderReader
from tokenspeed.weights.formats import LOAD_FORMATS, LoadPlan, open_weights
from tokenspeed.weights.npcache_reader import NpcacheReader
from tokenspeed.weights.pt_reader import PtReader
from tokenspeed.weights.safetensors_reader import SafetensorsReader
from tokenspeed_kernel.api import Weight

TENSORS = {
    "a.weight": torch.randn(4, 6),
    "b.weight": torch.randn(3, 5).bfloat16(),
    "c.bias": torch.randn(7).half(),
}
CONFIG: Any = type("Config", (ModelConfig,), {"__init__": lambda self: None})()
object.__setattr__(CONFIG, "dtype", "bfloat16")


def read_all(reader: WeightReader) -> dict[str, Weight]:
    return {name: reader.read(name, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_named_tensors_take_the_place_of_the_source(load_format: str, tmp_path: Path) -> None:
    write(tmp_path, "safetensors")
    sent = {"a.weight": torch.full((4, 6), 3.0), "new.bias": torch.ones(4), "odd": torch.ones(2, dtype=torch.int8)}
    plan = LoadPlan(load_format, None, {}, torch.device("cpu"), sent)
    reader = open_weights(ModelSource("folder", tmp_path, "m"), CONFIG, plan)
    without = opened(tmp_path, load_format)
    for name, want in TENSORS.items():
        got, other = reader.read(name, tuple(want.shape)), without.read(name, tuple(want.shape))
        assert isinstance(got, torch.Tensor) and isinstance(other, torch.Tensor)
        assert torch.equal(got, sent.get(name, other))
    with pytest.raises(ModelError, match=r"serialized_named_tensors: tensor 'a\.weight' has shape \[4, 6\]"):
        reader.read("a.weight", (4, 7))
    with pytest.raises(ModelError, match="serialized_named_tensors: tensor 'odd' has dtype int8"):
        reader.read("odd", (2,))
    with pytest.raises(ModelError, match=r"serialized_named_tensors: tensor 'new\.bias' has no place"):
        reader.check_all_used(("odd",), ())
    reader.read("new.bias", (4,))
    reader.check_all_used(("odd",), ())


def same(reader: WeightReader) -> bool:
    found = read_all(reader)
    return all(
        isinstance(got := found[name], torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
        for name, want in TENSORS.items()
    )


def opened(folder: Path, load_format: str, extra: dict[str, Any] | None = None) -> WeightReader:
    plan = LoadPlan(load_format, None, extra or {}, torch.device("cpu"))
    return open_weights(ModelSource("folder", folder, "m"), CONFIG, plan)


def write(folder: Path, kind: str) -> None:
    first, second = dict(list(TENSORS.items())[:1]), dict(list(TENSORS.items())[1:])
    if kind == "safetensors":
        save_file(TENSORS, folder / "model.safetensors")
    elif kind == "pt":
        torch.save(TENSORS, folder / "pytorch_model.bin")
    else:
        torch.save(first, folder / "one.bin")
        torch.save(second, folder / "two.bin")
        where = dict.fromkeys(first, "one.bin") | dict.fromkeys(second, "two.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("kind", "load_format"),
    [
        ("safetensors", "auto"),
        ("safetensors", "safetensors"),
        ("safetensors", "instanttensor"),
        ("safetensors", "npcache"),
        ("pt", "auto"),
        ("pt", "pt"),
        ("pt", "npcache"),
        ("shards of pt", "auto"),
        ("shards of pt", "pt"),
    ],
)
def test_every_format_gives_the_same_tensors(kind: str, load_format: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    reader = opened(tmp_path, load_format)
    assert reader.num_tensors == 3
    assert same(reader)
    reader.check_all_used((), ())
    assert same(opened(tmp_path, load_format))


def test_old_files_of_torch_that_cannot_be_mapped_are_read(tmp_path: Path) -> None:
    torch.save({"state_dict": TENSORS}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    assert same(PtReader(tmp_path))


def test_every_name_of_the_flag_has_a_reader() -> None:
    from tokenspeed.config.flags_table import ENGINE_FLAGS

    names = next(flag.choices for flag in ENGINE_FLAGS if flag.name == "--load-format")
    assert set(names) == {"auto", *LOAD_FORMATS}


class _Code:
    def __reduce__(self) -> Any:
        return (os.system, ("true",))


def test_pt_files_that_carry_code_or_are_damaged_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    with pytest.raises(ModelError, match=r"no \*\.bin or \*\.pt file in the folder"):
        PtReader(tmp_path)
    file.write_bytes(pickle.dumps({"a": _Code()}))
    with pytest.raises(ModelError, match=r"holds more than tensors, or is no file of torch\.save") as raised:
        PtReader(tmp_path)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)
    torch.save({"a": torch.ones(1000)}, file)
    content = file.read_bytes()
    for length in (3, 100, len(content) - 200):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"truncated or damaged|no file of torch\.save") as raised:
            PtReader(tmp_path)
        assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)
    torch.save([torch.ones(1)], file)
    with pytest.raises(ModelError, match="not a dictionary of tensors"):
        PtReader(tmp_path)


def test_missing_shard_of_pt_is_named(tmp_path: Path) -> None:
    write(tmp_path, "shards of pt")
    (tmp_path / "two.bin").unlink()
    with pytest.raises(
        ModelError, match=r"two\.bin: the shard is missing \(named in pytorch_model\.bin\.index\.json\)"
    ):
        PtReader(tmp_path)


class Counting(SafetensorsReader):
    """Counts how often tensors are read."""

    reads = 0

    def stored(self, name: str) -> torch.Tensor:
        Counting.reads += 1
        return super().stored(name)


def test_numpy_copy_is_made_once_and_again_when_its_source_changes(tmp_path: Path) -> None:
    write(tmp_path, "safetensors")
    Counting.reads = 0
    assert same(NpcacheReader(tmp_path, Counting(tmp_path)))
    assert same(NpcacheReader(tmp_path, Counting(tmp_path)))
    assert Counting.reads == 3
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    changed = NpcacheReader(tmp_path, Counting(tmp_path))
    assert Counting.reads == 6
    assert torch.equal(changed.stored("a.weight"), TENSORS["a.weight"] + 1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".np")] == []


def test_half_a_numpy_copy_never_gets_its_name(tmp_path: Path) -> None:
    write(tmp_path, "safetensors")

    class Breaking(SafetensorsReader):
        def stored(self, name: str) -> torch.Tensor:
            if name == "b.weight":
                raise ModelError("model.safetensors: damaged")
            return super().stored(name)

    with pytest.raises(ModelError, match="damaged"):
        NpcacheReader(tmp_path, Breaking(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_numpy_copy_goes_to_the_cache_folder_where_the_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "m", tmp_path / "cache"
    folder.mkdir()
    write(folder, "safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # Tests may run as root, who may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    assert same(NpcacheReader(folder, SafetensorsReader(folder)))
    assert not (folder / "np").exists()
    assert len(list((cache / "tokenspeed" / "npcache").iterdir())) == 1


def test_damaged_numpy_file_says_what_to_delete(tmp_path: Path) -> None:
    write(tmp_path, "safetensors")
    NpcacheReader(tmp_path, SafetensorsReader(tmp_path))
    for file in (tmp_path / "np").glob("*.npy"):
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"\.npy: damaged \(.*delete .*/np, it is made again"):
        NpcacheReader(tmp_path, SafetensorsReader(tmp_path)).read("a.weight", (4, 6))


class Ours(FolderReader):
    """A load format of a user's: one numpy archive."""

    def __init__(self, source: ModelSource, config: ModelConfig, archive: str) -> None:
        self._arrays = np.load(source.path / archive)
        super().__init__(source.path, dict.fromkeys(self._arrays.files, source.path / archive))

    def stored(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._arrays[name])


def test_class_of_the_user_is_a_load_format(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", allow_pickle=False, **{"a.weight": TENSORS["a.weight"].numpy()})
    reader = opened(tmp_path, "extensible", {"loader": f"{__name__}:Ours", "archive": "w.npz"})
    got = reader.read("a.weight", (4, 6))
    assert isinstance(got, torch.Tensor) and torch.equal(got, TENSORS["a.weight"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "extensible needs"),
        ({"loader": "nowhere_at_all:Class"}, "cannot be imported"),
        ({"loader": f"{__name__}:Missing"}, "cannot be imported"),
        ({"loader": f"{__name__}:Ours", "colour": 1}, "does not take these arguments"),
        ({"loader": "builtins:dict", "a": 1}, "does not take these arguments|made a dict"),
    ],
)
def test_class_that_is_no_reader_is_refused_by_flag(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        opened(tmp_path, "extensible", extra)
    assert str(raised.value).startswith("--model-loader-extra-config: ")


@pytest.mark.parametrize("load_format", ["safetensors", "pt", "npcache", "instanttensor"])
def test_formats_of_folders_refuse_a_file(load_format: str, tmp_path: Path) -> None:
    plan = LoadPlan(load_format, None, {}, torch.device("cpu"))
    with pytest.raises(ModelError, match=f"not a folder of weights, as --load-format {load_format} needs"):
        open_weights(ModelSource("gguf", tmp_path / "m.gguf", "m"), CONFIG, plan)


def test_dummy_weights_are_quantized_as_the_flag_says() -> None:
    from tokenspeed.config.quantization import QuantGroup, Quantization

    group = QuantGroup(("Linear",), "fp8", (0, 0), rounds_inputs=False)
    reader = DummyReader(torch.bfloat16, torch.device("cpu"), Quantization("fp8", (group,), (), online=True))
    assert not isinstance(reader.read("x.q_proj.weight", (8, 64)), torch.Tensor)
    assert isinstance(reader.read("x.embed_tokens.weight", (8, 64)), torch.Tensor)
