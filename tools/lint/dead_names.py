# SPDX-License-Identifier: MIT
"""Checks that what the documents name in backticks still exists in the tree.

Read: links and inline code of README.md and docs/*.md; fenced blocks hold commands and output. A span is checked when
it looks like one of ours: a path with a slash, a file name, a Bazel label, a dotted name, CamelCase, snake_case, a
call with (), an environment variable. Flags, HTTP paths, data files, values and commands pass.
`<!-- names: off -->` and `<!-- names: on -->` enclose text that speaks about other programs.

Python names are definitions found in the syntax tree, so that a name that lives on in a comment only is dead. C++,
proto, shell and Bazel names are the identifiers of their files without comments.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOTS = ("", "python/", "python/tokenspeed/", "kernels/", "kernels/tokenspeed_kernel/", "cc/", "docs/", "tools/")
FILE_NAME = re.compile(r"[\w*.-]+\.(?:py|pyi|cc|h|cu|md|proto|sh|toml|bzl|bazel|nix|tsv|txt|lock)")
DATA_FILE = re.compile(r"[\w*.-]+\.(?:json|jsonl|safetensors|gguf|jinja|model|so|whl|pb)")
PATH = re.compile(r"[\w@.*+-]+(?:/[\w@.*+-]+)*/?")
LABEL = re.compile(r"(?:@\w+)?//[\w./-]*(?::[\w./-]+)?")
NAME = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*(?:\(\))?")
ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
C_LIKE = {".cc", ".h", ".cu", ".proto"}
HASH_LIKE = {".bzl", ".bazel", ".sh", ".nix", ".toml"}
# Names of the languages and of their standard libraries.
FOREIGN = {"TypeError", "ValueError", "RuntimeError", "KeyError", "SystemExit", "NotImplementedError", "OSError"}


@dataclass
class Tree:
    """Everything that can be named: files, folders, identifiers, and the members of Python classes and modules."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, text: str) -> None:
        self.files.add(path)
        self.folders.update(str(parent) for parent in Path(path).parents)
        suffix = Path(path).suffix
        if suffix in {".py", ".pyi"}:
            self._add_python(path, text)
        elif suffix in C_LIKE:
            bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
            self.names.update(re.findall(r"[A-Za-z_]\w*", bare))
        elif suffix in HASH_LIKE or text.startswith("#!"):
            bare = re.sub(r"(?m)(?:^|\s)#.*$", " ", text)
            self.names.update(re.findall(r"[A-Za-z_]\w*", bare))
        if Path(path).name == "BUILD.bazel":
            self.texts[str(Path(path).parent)] = text

    def _add_python(self, path: str, text: str) -> None:
        module = ast.parse(text)
        parts = Path(path).with_suffix("").parts
        self.names.update(parts)
        owner = parts[-2] if parts[-1] == "__init__" and len(parts) > 1 else parts[-1]
        self._add_scope(owner, module.body)
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                self.imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Environment variables, operations of the kernel registry and metrics are named by strings.
                self.names.update(ENVIRONMENT.findall(node.value))
                self.strings.add(node.value)
            elif isinstance(node, ast.arg):
                self.names.add(node.arg)

    def _add_scope(self, owner: str, body: list[ast.stmt]) -> None:
        members = self.members.setdefault(owner, set())
        for node in body:
            for name in defined_by(node):
                members.add(name)
                # What a module imports can be reached through it, but is not ours by that.
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    self.names.add(name)
            if isinstance(node, ast.ClassDef):
                self._add_scope(node.name, node.body)
                self.bases.setdefault(node.name, set()).update(ast.unparse(base) for base in node.bases)
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        self.members[node.name].update(attributes_of_self(method))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                self._add_scope(owner, node.body)

    def has_member(self, owner: str, name: str) -> bool:
        """Whether `owner.name` exists; owners that are not Python classes or modules of ours cannot be judged."""
        if owner not in self.members:
            return True
        if name in self.members[owner]:
            return True
        bases = self.bases.get(owner, set())
        ours = bases & self.members.keys()
        return any(self.has_member(base, name) for base in ours) or (bool(bases) and not ours and owner not in FOREIGN)


def defined_by(node: ast.stmt) -> Iterator[str]:
    """The names that one statement adds to its scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


def attributes_of_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Attributes that a method assigns on self."""
    for node in ast.walk(method):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Inline code of a document with its line number, fenced blocks and switched-off text left out."""
    fenced = off = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if "<!-- names: off -->" in line:
            off = True
        if not fenced and not off:
            yield from ((number, span) for span in re.findall(r"`([^`\n]+)`", line))
        if "<!-- names: on -->" in line:
            off = False


def dead_links(document: str, text: str, tree: Tree) -> Iterator[tuple[int, str]]:
    """Links of a document to files that do not exist, with their line numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", line):
            path = os.path.normpath(Path(document).parent / target)
            if "://" not in target and path not in tree.files | tree.folders:
                yield number, target


def dead(span: str, tree: Tree) -> str | None:
    """Why the span names nothing, or None when it exists or is not a name."""
    if DATA_FILE.fullmatch(span):
        return None
    if LABEL.fullmatch(span):
        return None if label_exists(span, tree) else "no such Bazel target"
    if ENVIRONMENT.fullmatch(span):
        return None if span in tree.names else "no such environment variable or constant"
    if (PATH.fullmatch(span) and "/" in span) or FILE_NAME.fullmatch(span):
        return None if path_exists(span, tree) else "no such file or folder"
    if NAME.fullmatch(span) and is_code_name(span) and span not in tree.strings:
        return dead_name(span, tree)
    return None


def is_code_name(span: str) -> bool:
    """Whether an identifier looks like a name from code, not like a word or a value."""
    return bool(span.endswith("()") or "." in span or "::" in span or "_" in span.strip("_") or is_camel(span))


def is_camel(span: str) -> bool:
    return bool(re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}[A-Z]*|k(?:[A-Z][a-z0-9]+)+", span))


def dead_name(span: str, tree: Tree) -> str | None:
    parts = re.split(r"\.|::", span.removesuffix("()"))
    if parts[0] in FOREIGN or (parts[0] in tree.imported and parts[0] not in tree.names):
        return None
    for part in parts:
        if part not in tree.names and not any(part in known for known in tree.members.values()):
            return f"nothing is named {part}"
    for owner, name in itertools.pairwise(parts):
        if not tree.has_member(owner, name):
            return f"{owner} has no {name}"
    return None


def path_exists(span: str, tree: Tree) -> bool:
    wanted = span.rstrip("/")
    known = tree.files | tree.folders
    if "*" in wanted and "/" not in wanted:
        return any(fnmatch.fnmatch(Path(path).name, wanted) for path in tree.files)
    if "*" in wanted:
        return any(fnmatch.fnmatch(path, root + wanted) for root in ROOTS for path in known)
    if any(root + wanted in known for root in ROOTS):
        return True
    return "/" not in wanted and any(path.endswith("/" + wanted) for path in tree.files)


def label_exists(span: str, tree: Tree) -> bool:
    if span.startswith("@"):
        return True
    package, _, target = span.removeprefix("//").partition(":")
    if package.endswith("..."):
        return package.removesuffix("...").rstrip("/") in tree.folders | {""}
    build = tree.texts.get(package or ".")
    if build is None:
        return False
    target = target or package.rsplit("/", 1)[-1]
    return f'"{target}"' in build


def read_tree() -> Tree:
    tree = Tree()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in sorted(set(listed.split("\0")) - {""}):
        path = Path(name)
        if path.is_file() and not path.is_symlink():
            is_text = path.suffix in {".py", ".pyi"} | C_LIKE | HASH_LIKE or path.suffix == ""
            tree.add(name, path.read_text(encoding="utf-8") if is_text else "")
    return tree


def main() -> int:
    tree = read_tree()
    documents = [path for path in (Path("README.md"), *sorted(Path("docs").glob("*.md"))) if path.is_file()]
    found = 0
    for document in documents:
        text = document.read_text(encoding="utf-8")
        problems = [(number, f"`{span}`: {reason}") for number, span in spans(text) if (reason := dead(span, tree))]
        problems += [(number, f"{link}: no such file") for number, link in dead_links(str(document), text, tree)]
        for number, problem in sorted(problems):
            print(f"{document}:{number}: {problem}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
