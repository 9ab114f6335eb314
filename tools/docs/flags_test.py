# SPDX-License-Identifier: MIT
"""The page of flags names every flag once with its status, and tables stay tables whatever the texts contain."""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tools.docs.flags import SECTIONS, cell, page, section

HONOURED = Flag(("--a", "--alias"), "int", 3, "Does a | b.", "Group")
REFUSED = Flag(("--z",), "str", None, "", "Group", accepts=("none",), refusal="not in this release")


def test_an_honoured_flag_shows_aliases_default_and_text() -> None:
    lines = section("T", "`ts`", (HONOURED, REFUSED))
    assert "`ts`: 1 flags honoured, 1 refused." in lines
    assert "| `--a`, `--alias` | whole number | `3` | Does a \\| b. |" in lines


def test_a_refused_flag_shows_what_passes_and_why_not() -> None:
    assert "| `--z` | `none` | not in this release |" in section("T", "`ts`", (HONOURED, REFUSED))


def test_a_cell_is_one_line() -> None:
    assert cell("a\n b | c") == "a b \\| c"


def test_every_flag_of_every_table_is_on_the_page() -> None:
    text = page()
    for _, _, table in SECTIONS:
        for flag in table:
            assert all(f"`{name}`" in text for name in flag.names)
