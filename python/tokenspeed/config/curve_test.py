# SPDX-License-Identifier: MIT
"""Keys from files and flags: both halves or none, and no key in an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.config.curve import EngineCurve, GatewayCurve, engine_curve, gateway_curve
from tokenspeed.config.flags import FlagError

KEY, OTHER = "a" * 40, "B" * 40


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_keys_are_read(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", KEY + "\n")
    assert engine_curve(secret, OTHER) == EngineCurve(KEY, OTHER)
    peers = write(tmp_path / "peers", f"{KEY}\n{OTHER}\n")
    assert gateway_curve(secret, peers) == GatewayCurve(KEY, frozenset({KEY, OTHER}))
    assert engine_curve(None, None) is None and gateway_curve(None, None) is None


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", KEY)
    for one, other in ((secret, None), (None, KEY)):
        with pytest.raises(FlagError, match="belong together"):
            engine_curve(one, other)
        with pytest.raises(FlagError, match="belong together"):
            gateway_curve(one, other)


@pytest.mark.parametrize("text", ["", "short", KEY + "x", '"' * 40])
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(FlagError, match="secret-key-file") as caught:
        engine_curve(write(tmp_path / "secret", text), KEY)
    assert not text or text not in str(caught.value)
    with pytest.raises(FlagError, match="peer-keys-file"):
        gateway_curve(write(tmp_path / "good", KEY), write(tmp_path / "peers", text))


def test_a_secret_is_in_no_representation() -> None:
    assert KEY not in repr(EngineCurve(KEY, OTHER)) and KEY not in repr(GatewayCurve(KEY, frozenset({OTHER})))
