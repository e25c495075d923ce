"""Resolution of model URIs to folders, and commits of unpinned models: what `pull` reports, fetches and resolves.

The init container `pull` also runs where only a forward proxy reaches the hub.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.types import Defaults, Deployment
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
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import BadUri, NotPresent
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
    pod.repository.requests.clear()
    assert pod.pull(URI) == 0
    assert pod.reported == {URI: COMMIT}
    assert not pod.repository.requests, "nothing is fetched now"


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


MIRROR = "hub.invalid"
"""Host of the hub. No name server knows it."""


@contextmanager
def forward_proxy(hub: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy that knows where the hub is, and the hosts that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked.append(url.hostname or "")
            target = urlsplit(hub) if url.hostname == MIRROR else url
            upstream = http.client.HTTPConnection(target.hostname or "", target.port or 80, timeout=10)
            upstream.request(self.command, url.path, headers=dict(self.headers))
            answer = upstream.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            upstream.close()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_pull_reaches_a_mirror_through_the_proxy_that_the_workers_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # A container without the setting asks nobody but this machine.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    repository = Repository(FILES)
    with StandInHub(repository) as hub, forward_proxy(hub.url) as (proxy, asked):
        settings = {"HTTP_PROXY": proxy, "HF_ENDPOINT": f"http://{MIRROR}"}
        env = [{"name": name, "value": value} for name, value in settings.items()]
        template = {"spec": {"containers": [{"name": "worker", "env": env}]}}
        workers = {"template": template}
        spec = Spec.model_validate({"model": {"uri": URI}, "speculation": {"method": "none"}, "workers": workers})
        deployment = Deployment(namespace="ns", name="llama", uid="u", generation=1, spec=spec, status=Status())
        template = manifests.pod_template(deployment, Defaults(worker_image="w", worker_image_pull_policy="Never"))
        (pull,) = template["spec"]["initContainers"]
        for variable in pull["env"]:
            monkeypatch.setenv(variable["name"], variable["value"])
        program, *words = pull["command"]
        assert program == "specdecode-worker"
        words[words.index("--cache-dir") + 1] = str(tmp_path)
        assert main(words) == 0
    assert (resolve(URI, tmp_path) / "model.safetensors").read_bytes() == b"w" * 100
    assert set(asked) == {MIRROR, "localhost"}, "large files come from another host, through the proxy too"


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
