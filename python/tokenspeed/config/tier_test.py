# SPDX-License-Identifier: MIT
"""The host tier of a command line, as a table."""

from __future__ import annotations

import pytest

from tokenspeed.config.flags import FlagError, parse_flags
from tokenspeed.config.flags_table import ENGINE_FLAGS
from tokenspeed.config.tier import FolderConfig, TierConfig, tier_of


def tier(argv: str) -> TierConfig | None:
    return tier_of(parse_flags(argv.split(), ENGINE_FLAGS).values)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", None),
        ("--kvstore-ratio 0", None),
        ("--kvstore-size 0", None),
        ("--kvstore-io-backend direct", None),
        ("--kvstore-ratio 2", TierConfig(2.0, None, True)),
        ("--kvstore-ratio 0.5 --kvstore-io-backend direct", TierConfig(0.5, None, False)),
        ("--kvstore-size 64", TierConfig(0.0, 64 * 10**9, True)),
        ("--kvstore-size 64 --kvstore-ratio 2", TierConfig(2.0, 64 * 10**9, True)),
        ("--kvstore-size 64 --disable-kvstore", None),
    ],
)
def test_it_is_as_large_as_was_asked_and_off_unless_it_was(argv: str, expected: TierConfig | None) -> None:
    assert tier(argv) == expected


def test_a_size_goes_before_a_ratio() -> None:
    found = [tier(argv) for argv in ("--kvstore-ratio 2", "--kvstore-size 64 --kvstore-ratio 2")]
    assert [config.sizing_flag for config in found if config] == ["--kvstore-ratio", "--kvstore-size"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("--kvstore-ratio -1", "--kvstore-ratio: -1 is not how many host blocks"),
        ("--kvstore-ratio nan", "--kvstore-ratio: nan"),
        ("--kvstore-size -2", "--kvstore-size: -2 is not a size in GB"),
        ("--kvstore-io-backend dma", "--kvstore-io-backend"),
        ("--kvstore-ratio 2 --disable-prefix-caching", "--kvstore-ratio: the host tier keeps cached prefixes"),
        ("--kvstore-size 2 --no-enable-prefix-caching", "--kvstore-size: the host tier keeps cached prefixes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: str, why: str) -> None:
    with pytest.raises(FlagError, match=why):
        tier(argv)


EXTRA = "--kvstore-storage-backend-extra-config"


@pytest.mark.parametrize(
    ("more", "ratio", "num_bytes"),
    [([], 2.0, None), (["--kvstore-ratio", "0.5"], 0.5, None), (["--kvstore-size", "3"], 0.0, 3 * 10**9)],
)
def test_a_folder_has_host_memory_before_it(more: list[str], ratio: float, num_bytes: int | None) -> None:
    argv = ["--kvstore-storage-backend", "file", EXTRA, '{"path": "/a b", "max_gb": 0.5}', *more]
    found = tier_of(parse_flags(argv, ENGINE_FLAGS).values)
    assert found == TierConfig(ratio, num_bytes, True, FolderConfig("/a b", 5 * 10**8, 2.0))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ('{"path": 3}', 'needs a "path"'),
        ('{"path": "x", "max_gb": 0}', "max_gb must be a number above 0, got 0"),
        ('{"path": "x", "wait_s": true}', "wait_s must be a number above 0, got True"),
        ('{"path": "x", "max_gb": 1e999}', "max_gb must be a number above 0, got inf"),
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_what_is_wrong_with_the_folder_is_said_by_key(extra: str, why: str) -> None:
    with pytest.raises(FlagError, match=f"^{EXTRA}: .*{why}"):
        tier_of(parse_flags(["--kvstore-storage-backend", "file", EXTRA, extra], ENGINE_FLAGS).values)
