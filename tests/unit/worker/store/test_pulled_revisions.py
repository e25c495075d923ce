"""Commits of unpinned models: what `pull` reports, and which commit it fetches and resolves where one is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.contract import (
    Artifact,
    DraftAssignment,
    DraftConfig,
    DraftTrial,
    Env,
    ModelConfig,
    Plan,
    Revisions,
    WorkerConfig,
)
from specdecode_worker.models.errors import NotPresent
from specdecode_worker.models.fetch import commit_in, hub_model, resolve
from specdecode_worker.termination import ENV_PATH
from support.published.hub import COMMIT, NEWER_COMMIT, Repository, StandInHub

URI = "hf://org/model"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100}


@dataclass
class Pod:
    """Environment of one container that runs `pull`, with a cache that may be shared."""

    cache: Path
    repository: Repository
    message: Path
    known: Path

    def pull(self, *uris: str) -> int:
        self.message.unlink(missing_ok=True)
        return main(["pull", *uris, "--cache-dir", str(self.cache)])

    @property
    def reported(self) -> dict[str, str]:
        return dict(Revisions.model_validate_json(self.message.read_text()).revisions)

    def mount(self, commit: str) -> None:
        self.known.write_text(Revisions(revisions={URI: commit}).model_dump_json())

    def has(self, commit: str) -> bool:
        return commit_in(resolve(URI, self.cache)) == commit


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    pod = Pod(tmp_path / "cache", Repository(FILES), tmp_path / "message", tmp_path / "revisions.json")
    with StandInHub(pod.repository) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv(ENV_PATH, str(pod.message))
        monkeypatch.setenv(Env.revisions_path, str(pod.known))
        yield pod


def test_the_commit_of_an_unpinned_uri_is_reported(pod: Pod) -> None:
    assert pod.pull(URI) == 0
    assert pod.reported == {URI: COMMIT}
    assert json.loads(pod.message.read_text())["kind"] == "specdecode-revisions"
    assert pod.pull(URI) == 0, "nothing is fetched now"
    assert pod.reported == {URI: COMMIT}


def test_a_pinned_uri_and_a_failed_pull_report_nothing(pod: Pod) -> None:
    assert pod.pull(f"{URI}@{COMMIT}") == 0
    assert not pod.message.exists()
    assert pod.pull(URI, "hf://org/absent") == 1
    assert not pod.message.exists()


def test_a_known_commit_is_fetched_although_the_branch_moved(pod: Pod) -> None:
    pod.repository.head = NEWER_COMMIT
    pod.mount(COMMIT)
    assert pod.pull(URI) == 0
    assert pod.reported == {URI: COMMIT}
    assert pod.has(COMMIT)


def test_a_shared_cache_with_another_commit_is_left_as_it_is(pod: Pod) -> None:
    """Another deployment may serve the files of the branch's folder."""
    pod.repository.head = NEWER_COMMIT
    assert pod.pull(URI) == 0
    branch = hub_model(URI).folder(pod.cache)
    pod.mount(COMMIT)
    assert pod.pull(URI) == 0
    assert pod.has(COMMIT)
    assert commit_in(branch) == NEWER_COMMIT
    pod.repository.requests.clear()
    assert pod.pull(URI) == 0
    assert not pod.repository.requests, "the commit is in the cache"


def test_a_branch_folder_that_has_the_commit_is_used(pod: Pod) -> None:
    assert pod.pull(URI) == 0
    pod.repository.requests.clear()
    pod.mount(COMMIT)
    assert pod.pull(URI) == 0
    assert not pod.repository.requests
    assert resolve(URI, pod.cache) == hub_model(URI).folder(pod.cache)


def test_a_worker_whose_pod_pulled_another_commit_serves_that(pod: Pod) -> None:
    """The commit of another pod may be reported first; a container that restarts has only its own pod's files."""
    assert pod.pull(URI) == 0
    pod.mount(NEWER_COMMIT)
    assert pod.has(COMMIT)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"revisions": {"hf://org/model": "main"}}'])
def test_an_unreadable_file_is_ignored(pod: Pod, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pod.known.write_text(text)
    assert pod.pull(URI) == 0
    assert pod.has(COMMIT)
    assert "revisions.json is ignored" in capsys.readouterr().err


def test_without_a_pull_the_model_is_not_present(pod: Pod) -> None:
    pod.mount(COMMIT)
    with pytest.raises(NotPresent):
        resolve(URI, pod.cache)


@pytest.mark.parametrize("spec_draft", ["file:///spec", "file:///of-another-spec"])
def test_a_pod_pulls_the_drafts_that_its_plan_assigns_to_it(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec_draft: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    config = WorkerConfig(
        model=ModelConfig(uri=f"file://{target}", served_name="m"), draft=DraftConfig(uri="file:///spec")
    )
    assignment = DraftAssignment(
        spec_draft=spec_draft,
        target=config.model.uri,
        stable=Artifact(uri="hf://org/absent", hash="a"),
        trial=DraftTrial(id="t", candidate=Artifact(uri=URI, hash="c"), pod="me"),
    )
    (tmp_path / "plan.json").write_text(Plan(assignment=assignment).model_dump_json())
    monkeypatch.setenv(Env.config, config.model_dump_json())
    monkeypatch.setenv(Env.plan_path, str(tmp_path / "plan.json"))
    monkeypatch.setenv(Env.pod_name, "me")
    assert pod.pull() == 0, "a draft that cannot be fetched does not keep the pod from serving"
    assert (pod.cache / "hf").exists() == (spec_draft == "file:///spec")
    if spec_draft == "file:///spec":
        assert pod.has(COMMIT)
