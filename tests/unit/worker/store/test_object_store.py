"""Models in a bucket of a real S3 server: fetched by content, never in part, and refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from specdecode_worker.__main__ import main
from specdecode_worker.models import download, download_folder
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import AccessDenied, BadUri, DiskFull, HashMismatch, HubUnreachable, NotOnHub
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.distillation.publication import publish
from specdecode_worker.training.errors import PublishFailed
from support import small_model
from support.storage_servers.s3_server import S3Server, s3_server

pytestmark = pytest.mark.slow

URI = "s3://heads/drafts/sql"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def client(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    small_model.write_draft(folder)
    (folder / "calibration.json").write_text('{"sharpness": [1.0]}')
    return folder


@pytest.fixture
def bucket() -> S3Store:
    """Return the client of the folder that URI names, which is emptied."""
    store = S3Store("heads", prefix="drafts/sql", client_options={"allow_http": True})
    obstore.put(store, "README.md", b"not a part of the model")
    for entry in obstore.list(store).collect():
        obstore.delete(store, str(entry["path"]))
    return store


def test_draft_is_fetched_with_its_calibration(head: Path, bucket: S3Store, tmp_path: Path) -> None:
    download.upload(head, URI)
    obstore.put(bucket, "README.md", b"no model file")
    obstore.put(bucket, "run/config.json", b"of another model")
    obstore.put(bucket, "additional_chat_templates/tool_use.jinja", b"{{ tools }}")
    folder = model_store.resolve(URI, tmp_path / "cache")
    assert model_hash(folder) == model_hash(head)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "calibration.json", "additional_chat_templates", download_folder.MANIFEST
    }  # fmt: skip
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"{{ tools }}"
    fetched = (folder / download_folder.MANIFEST).stat().st_mtime_ns
    assert model_store.resolve(URI, tmp_path / "cache") == folder
    assert (folder / download_folder.MANIFEST).stat().st_mtime_ns == fetched, "what is there is not fetched again"


@pytest.mark.usefixtures("bucket")
def test_draft_that_changes_meanwhile_is_not_taken(head: Path, bucket: S3Store, tmp_path: Path) -> None:
    download.upload(head, URI)

    def overwrite(name: str, received: int, size: int) -> None:
        if (name, received) == ("config.json", size):
            obstore.put(bucket, "model.safetensors", b"of the next draft")

    with pytest.raises(HashMismatch, match="changed while it was fetched"):
        download.fetch(URI, tmp_path / "cache", overwrite)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.usefixtures("bucket")
def test_an_interrupted_download_is_never_used_and_goes_on(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PART_BYTES", 4096)
    download.upload(head, URI)
    seen: list[int] = []

    def kill(name: str, received: int, size: int) -> None:
        if name == "model.safetensors" and received > size // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.fetch(URI, tmp_path / "cache", kill)
    base = download.Bucket(URI).folder(tmp_path / "cache")
    (base / ".killed").mkdir()
    (base / ".killed" / "config.json").write_text("{")
    folder = download.fetch(URI, tmp_path / "cache", lambda name, received, _: seen.append(received))
    assert seen[0] > 2 * 4096, "parts that were received before count"
    assert model_hash(folder) == model_hash(head)
    assert list(base.iterdir()) == [folder]


def test_a_flipped_byte_of_a_published_draft_is_refused(head: Path, bucket: S3Store, tmp_path: Path) -> None:
    download.upload(head, URI)
    weights = bytearray((head / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    obstore.put(bucket, "model.safetensors", bytes(weights))
    with pytest.raises(HashMismatch, match=r"model\.safetensors has hash"):
        download.fetch(URI, tmp_path / "cache")


@pytest.mark.usefixtures("bucket")
def test_two_processes_fetch_once(head: Path, tmp_path: Path) -> None:
    download.upload(head, URI)
    calls: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(download.fetch, URI, tmp_path / "cache", lambda name, *_: calls.append(name))
    assert calls.count("config.json") == 1


@pytest.mark.usefixtures("bucket")
def test_known_draft_is_used_while_the_store_is_gone(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    download.upload(head, URI)
    folder = model_store.resolve(URI, tmp_path / "cache")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert model_store.resolve(URI, tmp_path / "cache") == folder
    assert "the content that was fetched last is used" in capsys.readouterr().err
    with pytest.raises(HubUnreachable, match="AWS_ENDPOINT_URL_S3"):
        model_store.resolve(URI, tmp_path / "other")


NO_DIGEST = b'{"files": [{"name": "model.safetensors", "digest": null}]}'


@pytest.mark.parametrize("manifest", [b"{", b"[]", b'{"files": [1]}', NO_DIGEST])
def test_a_manifest_that_cannot_be_read_is_named(manifest: bytes, head: Path, bucket: S3Store, tmp_path: Path) -> None:
    """It is no store that does not answer, for which the content that was fetched last would be used."""
    download.upload(head, URI)
    model_store.resolve(URI, tmp_path / "cache")
    obstore.put(bucket, download_folder.MANIFEST, manifest)
    with pytest.raises(NotOnHub, match="is no manifest; upload the model again, or delete it"):
        model_store.resolve(URI, tmp_path / "cache")


@pytest.mark.usefixtures("bucket")
def test_unwritable_cache_leaves_the_folder_for_temporary_files(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    cache, temporary = tmp_path / "file" / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    download.upload(head, URI)
    first = model_store.resolve(URI, cache)
    assert first.is_relative_to(temporary)
    size = sum(path.stat().st_size for path in first.iterdir())
    monkeypatch.setattr(download, "TEMPORARY_BYTES", size * 3 // 2)
    (head / "calibration.json").write_text('{"sharpness": [3.0]}')
    download.upload(head, URI)
    second = model_store.resolve(URI, cache)
    assert (first.exists(), model_hash(second)) == (False, model_hash(head)), "the older one made room"
    monkeypatch.setattr(download, "TEMPORARY_BYTES", size // 2)
    (head / "calibration.json").write_text('{"sharpness": [4.0]}')
    download.upload(head, URI)
    with pytest.raises(DiskFull, match="so that `pull` fetches it"):
        model_store.resolve(URI, cache)


@pytest.mark.parametrize(
    ("uri", "variables", "error"),
    [
        ("s3://heads/nothing-here", {}, NotOnHub),
        ("s3://no-such-bucket/x", {}, NotOnHub),
        (URI, {"AWS_SECRET_ACCESS_KEY": "wrong"}, AccessDenied),
        ("s3://heads", {}, BadUri),
        ("s3://heads/../x", {}, BadUri),
        ("s3://UPPER/x", {}, BadUri),
        ("oci://registry/model:v1", {}, BadUri),
    ],
)
def test_model_that_cannot_be_fetched_is_explained(
    uri: str, variables: dict[str, str], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error) as raised:
        model_store.resolve(uri, tmp_path)
    assert "Debug source" not in str(raised.value)


def test_upload_becomes_a_model_with_its_last_file(head: Path, bucket: S3Store, tmp_path: Path) -> None:
    assert not obstore.list(bucket).collect()
    seen: list[bool] = []
    put: Callable[..., object] = obstore.put

    def watch(store: S3Store, name: str, path: Path) -> None:
        with pytest.raises(NotOnHub):
            model_store.resolve(URI, tmp_path / f"cache-{len(seen)}")
        seen.append(name == "config.json")
        put(store, name, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "put", watch)
        download.upload(head, URI)
    assert seen == [False, False, False, True]
    assert model_hash(model_store.resolve(URI, tmp_path / "cache")) == model_hash(head)


def test_pull_fetches_and_shows_progress(
    head: Path, bucket: S3Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    download.upload(head, URI)
    assert main(["pull", URI, "--cache-dir", str(tmp_path / "cache")]) == 0
    said = capsys.readouterr().err
    assert "model.safetensors  100 %" in said
    assert f"{URI} is in {tmp_path}" in said
    obstore.delete(bucket, "config.json")
    assert main(["pull", URI, "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "holds no config.json" in capsys.readouterr().err


def test_a_candidate_is_not_published_with_a_wrong_key(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PublishFailed, match="denies access"):
        publish(head, "s3://heads/next")
