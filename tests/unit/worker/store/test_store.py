"""Tests of the resolution of model URIs to folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import BadUri, NotPresent


def test_file_uri_resolves_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_store.resolve(f"file://{tmp_path}") == tmp_path
    with pytest.raises(NotPresent, match=r"holds no config\.json"):
        model_store.resolve("file:///nowhere")


def test_claim_uri_resolves_to_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "CLAIMS", tmp_path)
    folder = tmp_path / "claim" / "llama" / "8b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert model_store.resolve("pvc://claim/llama/8b") == folder
    with pytest.raises(BadUri):
        model_store.resolve("pvc://claim/../../etc")


def test_a_repository_has_a_folder_for_every_revision(tmp_path: Path) -> None:
    model = model_store.hub_model("hf://meta-llama/Llama-3.1-8B@refs/pr/1")
    assert (model.id, model.revision) == ("meta-llama/Llama-3.1-8B", "refs/pr/1")
    assert model.folder(tmp_path) == tmp_path / "hf" / "meta-llama" / "Llama-3.1-8B" / "refs--pr--1"
    assert model_store.hub_model("hf://a/b").revision == "main"


def test_folder_without_a_manifest_is_not_present(tmp_path: Path) -> None:
    folder = model_store.hub_model("hf://a/b").folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(NotPresent, match="pull hf://a/b@main"):
        model_store.resolve("hf://a/b", tmp_path)


def test_default_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert model_store.default_cache_dir() == Path("/somewhere/specdecode/models")


def test_an_unknown_embedded_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotPresent, match="there is no embedded model 'x'"):
        model_store.resolve("embedded://x", tmp_path)
