# SPDX-License-Identifier: MIT
"""The header reader against files of the `gguf` package, and against files that lie or stop early."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from tokenspeed.config.gguf import _TENSOR_TYPES, GGUFError, read_gguf
from tokenspeed.config.model_source import embedded_model_path


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("flag", True)
    writer.add_int64("negative", -7)
    writer.add_array("words", ["one", "zwei", "três", ""])
    writer.add_array("numbers", [3, 1, 2])
    writer.add_tensor("dense", np.arange(6, dtype=np.float32).reshape(2, 3))
    packed = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_what_was_written(small_file: Path) -> None:
    file = read_gguf(small_file)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["flag"] is True
    assert file.metadata["negative"] == -7
    assert file.metadata["words"] == ["one", "zwei", "três", ""]
    assert file.metadata["numbers"] == [3, 1, 2]
    dense, packed = file.tensors["dense"], file.tensors["packed"]
    assert (dense.shape, dense.type, dense.nbytes) == ((2, 3), "f32", 24)
    assert (packed.shape, packed.type, packed.nbytes) == ((4, 64), "q8_0", 4 * 2 * 34)
    content = small_file.read_bytes()
    assert struct.unpack("<6f", content[dense.offset : dense.offset + 24]) == (0, 1, 2, 3, 4, 5)


def test_block_sizes_are_those_of_the_format() -> None:
    for number, known in _TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name.lower() == known.name
        assert gguf.GGML_QUANT_SIZES[kind] == (known.block_values, known.block_bytes)


def test_embedded_model_reads_fast_and_agrees_with_the_gguf_package() -> None:
    path = embedded_model_path()
    durations_s = []
    for _ in range(3):
        started_at = time.process_time()
        file = read_gguf(path)
        durations_s.append(time.process_time() - started_at)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert set(file.tensors) == set(theirs)
    for name, tensor in file.tensors.items():
        assert tensor.offset == theirs[name].data_offset
        assert tensor.nbytes == theirs[name].n_bytes
        assert list(reversed(tensor.shape)) == theirs[name].shape.tolist()
        assert tensor.type == theirs[name].tensor_type.name.lower()
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert min(durations_s) < 0.3


def test_every_cut_is_reported_as_truncation(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    cut_file = tmp_path / "cut.gguf"
    for length in [4, 7, 8, 20, 24, 30, 60, 100, 150, 200, 300, 400, len(content) - 40, len(content) - 200]:
        cut_file.write_bytes(content[:length])
        with pytest.raises(GGUFError, match="truncated") as raised:
            read_gguf(cut_file)
        assert str(cut_file) in str(raised.value)
        assert "\n" not in str(raised.value)


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(GGUFError, match="cannot be read: No such file"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(GGUFError, match="empty"):
        read_gguf(path)
    path.write_bytes(b"PK\x03\x04 and the rest of a zip file")
    with pytest.raises(GGUFError, match="not a GGUF file"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(GGUFError, match="GGUF version 1"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(GGUFError, match="big-endian"):
        read_gguf(path)
    with pytest.raises(GGUFError, match="cannot be read"):
        read_gguf(tmp_path)


def test_counts_beyond_the_file_do_not_allocate_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = b"k" * 3
    entry = struct.pack("<Q", len(key)) + key
    for array in (struct.pack("<IIQ", 9, 8, 2**60), struct.pack("<IIQ", 9, 4, 2**60), struct.pack("<IQ", 8, 2**62)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + array + bytes(64))
        with pytest.raises(GGUFError, match="truncated"):
            read_gguf(path)


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 200, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(64))
    with pytest.raises(GGUFError, match="tensor 't' has type number 200"):
        read_gguf(path)
