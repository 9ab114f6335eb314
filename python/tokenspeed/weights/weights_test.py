# SPDX-License-Identifier: MIT
"""Readers, names, sharding: what a file holds is what a layer gets."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import mmap
import os
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import embedded_model_path
from tokenspeed.parallel import Group
from tokenspeed.weights.checksums import check_sums
from tokenspeed.weights.gguf_reader import GGUFReader, HeadCounts, half_split_rows
from tokenspeed.weights.names import NameTable
from tokenspeed.weights.progress import Progress
from tokenspeed.weights.read_ahead import ReadAhead
from tokenspeed.weights.safetensors_reader import SafetensorsReader
from tokenspeed.weights.shard import check_even, own_columns, own_rows, stack
from tokenspeed_kernel.api import PackedWeight, Weight
from tokenspeed_kernel.quant.reference import dequantize

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def packed(num_rows: int, num_columns: int, kind: gguf.GGMLQuantizationType = Q8_0, seed: int = 0) -> PackedWeight:
    random = np.random.default_rng(seed).standard_normal((num_rows, num_columns)).astype(np.float32)
    data = torch.from_numpy(gguf.quantize(random, kind))
    return PackedWeight(data, kind.name.lower(), (num_rows, num_columns))


def values(weight: Weight) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, PackedWeight) else weight


def test_names_map_both_ways_for_every_tensor_of_the_embedded_model() -> None:
    names, table = list(read_gguf(embedded_model_path()).tensors), NameTable("llama")
    assert [table.gguf(table.checkpoint(name)) for name in names] == names
    assert table.checkpoint("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert table.checkpoint("token_embd.weight") == "model.embed_tokens.weight"
    assert table.gguf("model.layers.3.self_attn.q_proj.bias") == "blk.3.attn_q.bias"
    assert table.checkpoint("rope_freqs.weight") == "rope_freqs.weight"


def test_an_architecture_may_mean_another_norm_by_a_name() -> None:
    assert NameTable("llama").checkpoint("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    for gemma in ("gemma2", "gemma3"):
        assert NameTable(gemma).checkpoint("blk.0.ffn_norm.weight") == "model.layers.0.pre_feedforward_layernorm.weight"


def test_rows_of_q_and_k_go_from_neighbouring_pairs_to_halves() -> None:
    # One head of eight rows, labelled by their place in a checkpoint.
    in_file = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    assert half_split_rows(in_file, 1).tolist() == list(range(8))
    two_heads = torch.cat([in_file, in_file + 8])[:, None].expand(16, 3)
    assert half_split_rows(two_heads, 2)[:, 0].tolist() == list(range(16))


def test_packed_rows_are_permuted_like_dense_ones() -> None:
    reader = GGUFReader(embedded_model_path(), HeadCounts(9, 3))
    name = "model.layers.4.self_attn.k_proj.weight"
    weight = reader.read(name, (192, 576))
    assert isinstance(weight, PackedWeight)
    assert weight.format == "q4_1"
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(str(embedded_model_path())).tensors}
    dense = torch.from_numpy(gguf.dequantize(in_file["blk.4.attn_k.weight"].data, Q4_1).copy())
    assert torch.equal(dequantize(weight), half_split_rows(dense, 3))


def test_reader_says_what_is_missing_or_misshapen() -> None:
    reader = GGUFReader(embedded_model_path(), HeadCounts(9, 3))
    with pytest.raises(ModelError, match=r"tensor 'blk\.99\.attn_q\.weight' is missing"):
        reader.read("model.layers.99.self_attn.q_proj.weight", (576, 576))
    with pytest.raises(ModelError, match=r"has shape \[576\], the model's configuration asks for \[577\]"):
        reader.read("model.norm.weight", (577,))


def test_unsupported_gguf_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((2, 66), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="has type iq2_xxs, which is not supported"):
        GGUFReader(path, HeadCounts(1, 1)).read("model.layers.0.mlp.up_proj.weight", (2, 256))


def test_shards_put_together_are_the_whole() -> None:
    dense, quantized, odd = torch.arange(24.0).view(4, 6), packed(4, 128), torch.arange(35.0).view(5, 7)
    ranks = [Group(rank, 2) for rank in range(2)]
    for weight in (dense, quantized, odd):
        rows = [values(own_rows(weight, group, "w")) for group in ranks]
        columns = [values(own_columns(weight, group, "w")) for group in ranks]
        assert torch.equal(torch.cat(rows), values(weight))
        assert torch.equal(torch.cat(columns, dim=1), values(weight))


def test_shards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor x: size 3 is too small for 4 ranks"):
        own_columns(torch.ones(4, 3), Group(0, 4), "tensor x")
    with pytest.raises(ModelError, match="tensor x: size 6 does not divide among 4 ranks"):
        check_even(6, Group(0, 4), "tensor x")
    with pytest.raises(ModelError, match="48 columns for each of 2 ranks are not whole q8_0 blocks of 32"):
        own_columns(packed(2, 96), Group(0, 2), "tensor x")


def test_stack_joins_neighbours_of_one_format_only() -> None:
    first, second, third = packed(2, 256), packed(3, 256, seed=1), packed(1, 256, Q4_1)
    joined = stack([first, second, third])
    assert [part.shape for part in joined] == [(5, 256), (1, 256)]
    assert isinstance(joined[0], PackedWeight)
    assert torch.equal(dequantize(joined[0]), torch.cat([dequantize(first), dequantize(second)]))
    assert len(stack([torch.ones(2, 4), torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bfloat16)])) == 2


def test_safetensors_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors file in the folder"):
        SafetensorsReader(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.ones(64, 64), "b.weight": torch.ones(2, dtype=torch.int32)}, file)
    reader = SafetensorsReader(tmp_path)
    assert torch.equal(values(reader.read("a.weight", (64, 64))), torch.ones(64, 64))
    with pytest.raises(ModelError, match=r"'b\.weight' has dtype int32"):
        reader.read("b.weight", (2,))
    content = file.read_bytes()
    for length in (0, 4, 50, len(content) - 100):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError, match="truncated or not a safetensors file") as raised:
            SafetensorsReader(tmp_path)
        assert str(raised.value).startswith(str(file))


def test_missing_shard_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}))
    with pytest.raises(ModelError, match=r"two\.safetensors: the shard is missing"):
        SafetensorsReader(tmp_path)
    index.write_text('{"metadata": {}}')
    with pytest.raises(ModelError, match="not an index of shards"):
        SafetensorsReader(tmp_path)


def test_leftovers_are_those_that_nothing_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1), "x.inv_freq": torch.ones(1)}, tmp_path / "m.safetensors")
    reader = SafetensorsReader(tmp_path)
    reader.read("a", (1,))
    with pytest.raises(ModelError, match="tensor 'b' has no place"):
        reader.check_all_used(("inv_freq",), ())
    reader.read("b", (1,))
    reader.check_all_used(("inv_freq",), ())


def test_progress_draws_a_bar_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, live = io.StringIO(), Terminal()
    for stream in (quiet, live):
        progress = Progress("Loading", 2, stream)
        progress.advance()
        progress.advance()
        progress.finish()
    assert quiet.getvalue().count("\n") == 1
    assert "1/2" in live.getvalue()
    assert live.getvalue().endswith("Loading: 2 tensors in 0.0 s\n")


def resident_pages(file: Path) -> int:
    """Pages of the file that are in memory, by mincore(2)."""
    with file.open("rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages) == 0
        return sum(page & 1 for page in pages)


def test_files_are_read_ahead_whole_and_one_that_is_not_there_harms_nobody(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "gone")]
    for file in files:
        file.write_bytes(bytes(40 << 20))
        with file.open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ahead = ReadAhead(files, 2)
    files[2].unlink()
    ahead.wait()
    deadline_s = time.monotonic() + 20
    while any(resident_pages(file) * mmap.PAGESIZE < 40 << 20 for file in files[:2]):
        assert time.monotonic() < deadline_s, "the system reads on by itself"
        time.sleep(0.05)


def test_reading_ahead_ends_with_the_loader(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with file.open("wb") as data:
        data.truncate(1 << 40)  # a hole: it could go on for long
    with ReadAhead([file], 3):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("form", ["SHA256SUMS", "a.bin.sha256", "a.bin.sha256 alone"])
def test_a_file_that_is_not_what_its_checksum_says_is_named(tmp_path: Path, form: str) -> None:
    good, other = tmp_path / "a.bin", tmp_path / "b.bin"
    good.write_bytes(b"weights")
    other.write_bytes(b"others")
    want = hashlib.sha256(b"weights").hexdigest()
    line = {"SHA256SUMS": f"{want} *./a.bin\n\n", "a.bin.sha256": f"{want.upper()}  a.bin\n"}.get(form, want)
    (tmp_path / form.removesuffix(" alone")).write_text(line)
    check_sums([good, other])
    good.write_bytes(b"weight5")
    with pytest.raises(ModelError, match=rf"a\.bin: wrong SHA-256 [0-9a-f]{{64}}, .* says {want}; download it again"):
        check_sums([good, other])


def test_checksums_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text("\nabc  a.bin\n")
    with pytest.raises(ModelError, match=r"SHA256SUMS: line 2 is no SHA-256"):
        check_sums([tmp_path / "a.bin"])
