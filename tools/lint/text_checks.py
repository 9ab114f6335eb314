# SPDX-License-Identifier: MIT
"""Checks that need only the text of the files: licence line, opening essay, length, and what must not be said.

Run by tools/lint/run.sh on tracked files and new ones that are not ignored; prints `path:line: what is wrong` and
exits 1 if there is anything. Each check is a function of a path and its lines, so that the tests call it directly.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SPDX = "SPDX-License-Identifier: MIT"
MAX_LINES = 500
MAX_ESSAY_LINES = 15
SOURCE_SUFFIXES = {".py", ".pyi", ".cc", ".h", ".cu", ".cuh", ".proto", ".sh", ".nix", ".bzl", ".bazel"}
LIMITED_SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh", ".proto", ".sh"}
BINARY_SUFFIXES = {".png", ".gz", ".zip", ".gguf", ".safetensors", ".bin", ".npz"}

# Paths that exist on one machine only. Documented locations (the home folder as ~, /tmp, /usr, /etc) are fine.
MACHINE_PATH = re.compile(r"(?<![\w.$}/])/(?:work|root|home/\w+|opt/(?!cuda|nvidia)\w+)(?:/[\w.-]*)+")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
URL = re.compile(r"\bhttps?://(?:[^\s/@\"']*@)?([A-Za-z0-9.-]+)")
# A host that is not listed is a package registry, which the clients' own settings name, a private service or a slip.
KNOWN_HOSTS = re.compile(
    r"""(?:^|\.)(?:
      github\.com | githubusercontent\.com | pytorch\.org | nvidia\.com
    | huggingface\.co | nixos\.org | bazel\.build | arxiv\.org | spdx\.org | semver\.org
    | opensource\.org | json-schema\.org | openai\.com | python\.org | ietf\.org | rfc-editor\.org | prometheus\.io
    | opencontainers\.org | msgpack\.org | zeromq\.org | isocpp\.org | w3\.org | keepachangelog\.com
    | example\.(?:com|org|net|invalid) | invalid | test | localhost
    )$ | ^(?:127|10|192)(?:\.\d+){3}$ | ^(?:0\.){3}0$ | ^[a-z0-9-]+$""",
    re.VERBOSE,
)

Finding = tuple[int, str]


def check_licence(path: Path, lines: list[str]) -> Iterator[Finding]:
    """A source file says its licence in its first line, or in the second after a #!."""
    is_script = bool(lines) and lines[0].startswith("#!")
    if path.suffix not in SOURCE_SUFFIXES and not is_script:
        return
    if not any(line.strip() for line in lines):
        return
    if SPDX not in lines[1 if is_script and len(lines) > 1 else 0]:
        yield 1, f"the first line must say {SPDX}"


def check_essay(path: Path, lines: list[str]) -> Iterator[Finding]:
    """A Python module opens with a docstring that says in at most 15 lines what it owns."""
    if path.suffix != ".py":
        return
    try:
        module = ast.parse("\n".join(lines))
    except SyntaxError as error:
        yield error.lineno or 1, f"not Python: {error.msg}"
        return
    text = ast.get_docstring(module)
    if module.body and text is None:
        yield 1, "the module has no docstring"
    if text is not None and len(text.splitlines()) > MAX_ESSAY_LINES:
        yield 1, f"the module's docstring has {len(text.splitlines())} lines, more than {MAX_ESSAY_LINES}"


def check_length(path: Path, lines: list[str]) -> Iterator[Finding]:
    """No source file is longer than a reader's patience."""
    if path.suffix in LIMITED_SUFFIXES and len(lines) > MAX_LINES:
        yield MAX_LINES + 1, f"{len(lines)} lines, more than {MAX_LINES}: split it"


def check_words(path: Path, lines: list[str]) -> Iterator[Finding]:
    """Nothing unfinished, no path of one machine, no address of a private host, no stray white space."""
    if path.match("tools/lint/text_checks*.py"):
        return
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            yield number, "unfinished work is not left in the code"
        if found := MACHINE_PATH.search(line):
            yield number, f"{found.group()} exists on one machine only"
        for host in URL.findall(line):
            if not KNOWN_HOSTS.search(host.rstrip(".")):
                yield number, f"host {host} is not in KNOWN_HOSTS of tools/lint/text_checks.py"
        if line != line.rstrip() and path.suffix not in {".md", ".patch"}:
            yield number, "white space at the end of the line"


CHECKS = (check_licence, check_essay, check_length, check_words)


def tree_files() -> list[Path]:
    """Tracked files, and untracked ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = (Path(name) for name in sorted(set(listed.split("\0")) - {""}))
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.suffix not in BINARY_SUFFIXES]


def main() -> int:
    found = 0
    for path in tree_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            print(f"{path}:1: not UTF-8 text; give binary data one of the suffixes {sorted(BINARY_SUFFIXES)}")
            found += 1
            continue
        for check in CHECKS:
            for number, text in check(path, lines):
                print(f"{path}:{number}: {text}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
