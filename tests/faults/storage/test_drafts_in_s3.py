"""Drafts in a bucket of a real S3 server: at start, at a swap of a running worker, and while the server is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, Route, ServerConfig, WorkerConfig
from specdecode_worker.models.fetch import model_hash
from support import small_model
from support.storage_servers.s3_server import S3Server, s3_server
from support.worker_process import StartWorker, WorkerProcess

FIRST, NEXT = "s3://heads/first", "s3://heads/next"
LOAD_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def _upload(server: S3Server, folder: Path, uri: str) -> str:
    """Upload a small head and return its hash."""
    from specdecode_worker.models import download

    folder.mkdir()
    small_model.write_draft(folder)
    (folder / "calibration.json").write_text(f'{{"sharpness": [{len(uri)}.0]}}')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        download.upload(folder, uri)
    return model_hash(folder)


def _environment(target: Path, cache: Path, variables: dict[str, str]) -> dict[str, str]:
    config = WorkerConfig(
        model=ModelConfig(uri=f"file://{target}", served_name="small", dtype="float32"),
        draft=DraftConfig(method="eagle3", uri=FIRST),
        engine=EngineConfig(max_num_seqs=2, kv_cache_tokens=2048, device="cpu", threads=1),
        server=ServerConfig(host="127.0.0.1", port=0, admin_port=0),
        cache_dir=str(cache),
    )
    return {"SPECDECODE_CONFIG": config.model_dump_json(), **variables}


def _running_hash(worker: WorkerProcess) -> str:
    return str(worker.call_admin(Route.draft).json()["draft"]["hash"])


def test_worker_takes_drafts_from_a_bucket(
    server: S3Server, small_folder: Path, start_pod: StartWorker, tmp_path: Path
) -> None:
    first, following = (_upload(server, tmp_path / name, uri) for name, uri in (("first", FIRST), ("next", NEXT)))
    assert first != following
    cache = tmp_path / "cache"
    worker = start_pod(environment=_environment(small_folder, cache, server.environment))
    assert _running_hash(worker) == first
    body = {"uri": NEXT, "method": "eagle3", "expected_hash": following}
    refused = worker.call_admin(Route.draft, "PUT", json=body | {"expected_hash": "0" * 16})
    assert (refused.status_code, following in refused.text) == (409, True)
    assert worker.call_admin(Route.draft, "PUT", json=body).status_code == 202
    worker.wait_until(lambda: _running_hash(worker) == following, LOAD_SECONDS)
    missing = worker.call_admin(Route.draft, "PUT", json={"uri": "s3://heads/none", "method": "eagle3"})
    assert (missing.status_code, "does not exist" in missing.text or "holds no" in missing.text) == (409, True)
    assert _running_hash(worker) == following
    answer = httpx.post(
        f"{worker.public}/v1/completions", json={"model": "small", "prompt": "hello", "max_tokens": 4}, timeout=60
    )
    assert answer.status_code == 200
    worker.terminate()
    worker.exit_code()
    gone = server.environment | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    again = start_pod(environment=_environment(small_folder, cache, gone))
    assert _running_hash(again) == first, "the draft that was fetched before serves while the store is gone"
