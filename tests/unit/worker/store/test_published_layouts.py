"""Every repository that the documentation names can be pulled as it is published, from a hub on this machine."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.__main__ import main
from specdecode_worker.models import download
from specdecode_worker.models.download_folder import HubModel
from specdecode_worker.models.fetch import resolve
from support.published.hub import Repository, StandInHub
from support.published.repositories import LAYOUTS, TOKEN, repository

ROOT = Path(__file__).parents[4]
NAMED = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]*\w)(?:@(?P<revision>[\w.-]*\w))?")
PLACEHOLDERS = ("org/", "owner/")


def named_repositories() -> set[tuple[str, str]]:
    """Return the repositories, with their revisions, that README, docs and examples name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.yaml")]
    repositories = {(one["name"], one["revision"] or "") for page in pages for one in NAMED.finditer(page.read_text())}
    return {(name, revision) for name, revision in repositories if not name.startswith(PLACEHOLDERS)}


def test_every_named_repository_has_a_file_list_with_its_source() -> None:
    named = named_repositories()
    assert {name for name, _ in named} == LAYOUTS.keys()
    for name, revision in named:
        assert revision in ("", LAYOUTS[name].revision), name
    for name, layout in LAYOUTS.items():
        assert re.search(r"looked up \d{4}-\d\d-\d\d$", layout.source), name


def test_what_could_not_be_confirmed_is_marked_in_the_documentation() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    for name, layout in LAYOUTS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert ("not confirmed" in row) == (not layout.confirmed), name
        assert ("accept" in row) == layout.gated, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_files_that_are_needed_are_fetched(name: str) -> None:
    layout = LAYOUTS[name]
    wanted = download.wanted_files(name, layout.files)
    assert "config.json" in wanted
    assert not any(file.startswith("original/") for file in wanted)
    weights = [file for file in layout.files if file.endswith((".safetensors", ".bin"))]
    assert wanted[-len(weights) :] == weights


@pytest.mark.slow
def test_a_gated_target_in_shards_and_a_pickled_head_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    repositories = [repository(target), repository(head)]
    cache = tmp_path / "cache"
    uris = [f"hf://{target}@{LAYOUTS[target].revision}", f"hf://{head}"]
    words = ["pull", *uris, "--cache-dir", str(cache)]
    with StandInHub(*repositories) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert main(words) == 1
        assert "HF_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert main(words) == 0
        before = sum(len(one.requests) for one in repositories)
        assert main(words) == 0
        assert sum(len(one.requests) for one in repositories) == before, "what is there is not asked for again"
    folder = resolve(uris[1], cache)
    assert not list(folder.glob("*.bin")), "no pickle stays"
    published = torch.load(io.BytesIO(repositories[1].files["pytorch_model.bin"]), weights_only=True)
    stored: dict[str, Any] = load_file(folder / "model.safetensors")
    assert stored.keys() == published.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in published.items())
    check = ["check", "--model", uris[0], "--draft", uris[1], "--device", "cpu", "--cache-dir", str(cache)]
    assert main(check) == 0


@pytest.mark.slow
def test_a_pickled_head_that_is_refused_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04cposix\nsystem\n(V/bin/true\ntR."}
    with StandInHub(Repository(files)) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        assert main(["pull", "hf://org/model", "--cache-dir", str(tmp_path)]) == 1
    assert "pytorch_model.bin is refused" in capsys.readouterr().err
    assert not (HubModel("org", "model", "main").folder(tmp_path) / "specdecode-manifest.json").exists()
