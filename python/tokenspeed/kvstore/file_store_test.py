# SPDX-License-Identifier: MIT
"""Blocks in a folder: what was put is there for the next engine, what is not whole never was, and it stays bounded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenspeed.kvstore import FileStore, Names

NUM_BYTES = 1000
LARGE = 10**6


def names(count: int = 4, space: str = "a") -> Names:
    tokens = np.arange(count * 8, dtype=np.int32).reshape(count, 8)
    return Names(space, np.arange(10, 10 + count, dtype=np.uint64), np.arange(count, dtype=np.uint64), tokens)


def block(number: int) -> NDArray[np.uint8]:
    return np.full(NUM_BYTES, number + 1, np.uint8)


def found(store: FileStore, asked: Names, index: int) -> list[int] | None:
    row = np.zeros(NUM_BYTES, np.uint8)
    return row.tolist() if store.get(asked, index, row) else None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_one_engine_put_the_next_one_gets(tmp_path: Path) -> None:
    one = FileStore(tmp_path / "blocks", LARGE, "0of1")
    assert not one.has(names(), 2) and found(one, names(), 2) is None
    one.put(names(), 2, block(2))
    one.put(names(), 2, block(3))  # it is there already
    other = FileStore(tmp_path / "blocks", LARGE, "0of1")
    assert other.has(names(), 2)
    assert found(other, names(), 2) == block(2).tolist()
    assert len(files(tmp_path)) == 1


def test_other_ranks_and_other_spaces_have_blocks_of_their_own(tmp_path: Path) -> None:
    FileStore(tmp_path, LARGE, "0of2").put(names(), 1, block(1))
    assert not FileStore(tmp_path, LARGE, "1of2").has(names(), 1)
    assert not FileStore(tmp_path, LARGE, "0of1").has(names(), 1)
    store = FileStore(tmp_path, LARGE, "0of2")
    assert not store.has(names(space="b"), 1)
    store.put(names(space="b"), 1, block(5))
    store.drop("b")
    assert not store.has(names(space="b"), 1) and store.has(names(), 1)


@pytest.mark.parametrize("harm", ["cut", "flip a byte", "flip a token", "empty", "another size"])
def test_what_is_not_whole_is_deleted_and_was_never_there(tmp_path: Path, harm: str) -> None:
    store = FileStore(tmp_path, LARGE, "0of1")
    store.put(names(), 1, block(1))
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    if harm == "flip a byte":
        content[-7] ^= 1
    elif harm == "flip a token":
        content[40] ^= 1
    kept = {"cut": len(content) - 1, "empty": 0}.get(harm, len(content))
    path.write_bytes(content[:kept])
    asked, row = names(), np.zeros(NUM_BYTES + (8 if harm == "another size" else 0), np.uint8)
    assert not store.get(asked, 1, row)
    assert files(tmp_path) == []


def test_a_hash_of_other_tokens_or_another_parent_proves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LARGE, "0of1")
    for change in ("token_ids", "parent_hashes"):
        store.put(names(), 1, block(1))
        asked = names()
        getattr(asked, change)[1] += 1
        assert found(store, asked, 1) is None


def test_the_folder_stays_below_its_size_and_loses_what_was_used_longest_ago(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 12 * NUM_BYTES, "0of1")
    asked = names(30)
    for index in range(10):
        store.put(asked, index, block(index))
        (path,) = tmp_path.rglob(f"{10 + index:016x}*")
        os.utime(path, (index, index))
    assert found(store, asked, 0) is not None  # used just now
    for index in range(10, 30):
        store.put(asked, index, block(index))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 12 * NUM_BYTES
    assert store.has(asked, 29)
    assert not store.has(asked, 1), "the oldest"


def test_engines_that_share_a_folder_share_its_size(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, 40 * NUM_BYTES, "0of1") for _ in range(2)]
    asked = names(80)
    for index in range(80):
        stores[index % 2].put(asked, index, block(index))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 44 * NUM_BYTES


def test_a_folder_that_cannot_be_used_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileStore(tmp_path / "file", LARGE, "0of1")
