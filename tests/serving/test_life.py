"""Life cycle of a server process, from start to end, over sockets and signals. Only the engine is fake."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Env, Plan, WorkerConfig
from specdecode_worker.termination import ENV_PATH
from support.processes import cpu_seconds
from support.worker import fake_engine
from support.worker_process import SERVE_FAKE, WorkerProcess, fake, ready, worker_config

SILENT = [fake_engine.SILENT]


def config_of(folder: Path, **server: Any) -> WorkerConfig:
    return worker_config(folder, server=server, max_num_seqs=16)


Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(model_folder: Path, tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(**server: Any) -> WorkerProcess:
            return stack.enter_context(ready(fake(config_of(model_folder, **server), tmp_path / "log")))

        yield start


def stuck_stream(worker: WorkerProcess, choices: int = 1) -> Future[httpx.Response]:
    """Send a request that does not end by itself, and wait until it runs. Return its coming response."""
    stuck = ThreadPoolExecutor(1).submit(worker.complete, SILENT, stream=True, n=choices)
    worker.wait_until(lambda: worker.report().running == choices)
    return stuck


def test_sigterm_refuses_new_requests_and_finishes_running_ones(start: Start) -> None:
    worker = start(endpoint_delay_seconds=5, grace_period_seconds=60)
    body = {"model": "small", "prompt": SILENT, "stream": True}
    # A request that does not end by itself keeps the worker running.
    with httpx.stream("POST", worker.public + "/v1/completions", json=body, timeout=60) as running:
        worker.terminate()
        worker.wait_until(lambda: worker.get("/ready").status_code == 503)
        served = worker.complete(max_tokens=200)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        worker.wait_until(lambda: worker.complete().status_code == 503, 30)
        assert worker.complete().json()["error"]["code"] == "draining"
        assert worker.get("/health").status_code == 200
        assert running.status_code == 200
    assert worker.exit_code() == 0, worker.log


@pytest.mark.parametrize("how", ["second signal", "grace over"])
def test_unfinished_requests_end_with_an_error(start: Start, how: str) -> None:
    worker = start(endpoint_delay_seconds=0, grace_period_seconds=30 if how == "second signal" else 1)
    stuck = stuck_stream(worker)
    worker.terminate()
    if how == "second signal":
        worker.wait_until(lambda: worker.get("/ready").status_code == 503)
        worker.terminate()
    assert worker.exit_code() == 1
    assert '"code":"engine_error"' in stuck.result().text


def test_killed_engine_ends_the_server_with_an_error(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PATH, str(tmp_path / "words"))
    worker = start()
    stuck = stuck_stream(worker, choices=2)
    os.kill(worker.engine_pid, signal.SIGKILL)
    worker.wait_until(lambda: worker.get("/health").status_code == 503)
    assert worker.exit_code() == 1
    *_, last, end = stuck.result().text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error", "an error object ends the stream"
    assert end == ""
    assert "exit code -9" in last
    assert "exit code -9" in (tmp_path / "words").read_text()


def test_idle_engine_uses_no_cpu(start: Start) -> None:
    worker = start()
    before = cpu_seconds(worker.engine_pid)
    time.sleep(2)
    assert cpu_seconds(worker.engine_pid) - before < 0.025, "two ticks of 10 ms in two idle seconds at most"


def test_model_load_failure_ends_the_server(model_folder: Path, tmp_path: Path) -> None:
    config = worker_config(model_folder, dtype="float32")
    with fake(config, tmp_path / "log", {ENV_PATH: str(tmp_path / "words")}) as worker:
        assert worker.exit_code() == 1
        assert "planted: the weights do not load" in worker.log
    assert "planted: the weights do not load" in (tmp_path / "words").read_text()


def test_sigterm_while_loading_ends_at_once(model_folder: Path, tmp_path: Path) -> None:
    with fake(config_of(model_folder, endpoint_delay_seconds=30), tmp_path / "log") as worker:
        worker.terminate()
        assert worker.exit_code(25) == 0, worker.log


def end_at_start(config: WorkerConfig, **environment: str) -> str:
    """Start a server that ends with 1 at once, and return what it says."""
    words = [sys.executable, str(SERVE_FAKE), config.model_dump_json()]
    variables = os.environ | environment
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_port_in_use_is_reported(start: Start, model_folder: Path) -> None:
    port = httpx.URL(start().public).port
    ended = end_at_start(config_of(model_folder, port=port))
    assert f"cannot listen on 127.0.0.1:{port} (public port)" in ended


PLANS = {
    "a plan of ours": (Plan(uid="uid-1", version=7).model_dump_json(), 7),
    "another's plan": (Plan(uid="uid-2", version=7).model_dump_json(), 0),
    "no plan": ('{"version": "newest"}', 0),
    "an empty file": ("", 0),
}


@pytest.mark.parametrize(("written", "version"), PLANS.values(), ids=PLANS)
def test_mounted_plan_applies_from_the_first_request(
    model_folder: Path, tmp_path: Path, written: str, version: int
) -> None:
    (tmp_path / "plan.json").write_text(written)
    environment = {Env.plan_path: str(tmp_path / "plan.json")}
    with ready(fake(config_of(model_folder), tmp_path / "log", environment)) as worker:
        assert worker.report().plan.version == version
        assert worker.call_admin("/v1/plan").json()["version"] == version
        assert worker.complete().status_code == 200


def test_invalid_knobs_prevent_the_start(model_folder: Path) -> None:
    said = end_at_start(config_of(model_folder), **{Env.synthetic: '{"step_time": [{"seconds": 11}]}'})
    assert f"cannot start: ${Env.synthetic}: invalid step_time[0].seconds" in said


def test_public_port_requires_a_configured_api_key(model_folder: Path, tmp_path: Path) -> None:
    with ready(fake(config_of(model_folder), tmp_path / "log", {Env.api_keys: "first  second\n"})) as worker:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert worker.get(path).status_code == 200, path
        for sent in ({}, *({"Authorization": value} for value in ("Bearer third", "Basic first", "first"))):
            for path in ("/v1/completions", "/tokenize"):
                refused = httpx.post(worker.public + path, json={"model": "small", "prompt": "hi"}, headers=sent)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert httpx.get(worker.public + "/v1/models", headers=sent).status_code == 401
        for key in ("first", "second"):
            assert worker.complete(headers={"Authorization": f"Bearer {key}"}).status_code == 200
