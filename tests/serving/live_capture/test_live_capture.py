"""Capture that the plan switches on and off in a running worker, over its two ports."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.capture.segments import MAGIC, RETENTION_FILE, list_segments, segment_name
from specdecode_worker.contract import Env, Plan, Route, TaskMatch
from specdecode_worker.contract.capture import CaptureRules
from support.worker_process import WorkerProcess, fake, ready, worker_config

TOKENS = {"operator": "operators", "capture": "captures"}
ANN = "ann@example.org"
RULES = CaptureRules(share=1.0)
versions = count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live") / "captures"


@contextlib.contextmanager
def running(model_folder: Path, capture_dir: Path, **environment: str) -> Iterator[WorkerProcess]:
    tokens = capture_dir.parent / "tokens"
    tokens.mkdir(exist_ok=True)
    for name, token in TOKENS.items():
        (tokens / name).write_text(token)
    config = worker_config(model_folder, server={"admin_tokens_path": str(tokens)})
    config = config.model_copy(update={"capture_dir": str(capture_dir)})
    with ready(fake(config, capture_dir.parent / f"{next(versions)}.log", environment)) as worker:
        worker.admin_token = TOKENS["operator"]
        yield worker


@pytest.fixture(scope="module")
def running_worker_of_live_capture(model_folder: Path, folder: Path) -> Iterator[WorkerProcess]:
    with running(model_folder, folder) as worker:
        yield worker


@pytest.fixture
def worker(running_worker_of_live_capture: WorkerProcess, folder: Path) -> WorkerProcess:
    """Return the worker with an empty folder, while capture is off."""
    push(running_worker_of_live_capture, None)
    running_worker_of_live_capture.wait_until(lambda: not folder.exists() or not list(folder.iterdir()))
    return running_worker_of_live_capture


def admin(
    worker: WorkerProcess, path: str, method: str = "GET", token: str = "operators", **more: Any
) -> httpx.Response:
    return worker.call_admin(path, method, headers={"Authorization": f"Bearer {token}"}, timeout=30, **more)


def push(worker: WorkerProcess, rules: CaptureRules | None) -> None:
    worker.put_plan(Plan(uid="uid-1", version=next(versions), tasks=(TaskMatch(name="code"),), capture=rules))


def ask(worker: WorkerProcess, headers: dict[str, str] | None = None, **more: Any) -> None:
    answer = worker.complete(max_tokens=6, headers=headers, timeout=30, **more)
    assert answer.status_code == 200, answer.text


def records(folder: Path) -> list[Record]:
    return list(read_records([folder], ReadStats()))


def test_pushed_plan_switches_capture_on_and_off(worker: WorkerProcess, folder: Path) -> None:
    ask(worker)
    push(worker, RULES)
    ask(worker, n=2)
    worker.wait_until(lambda: worker.captured().conversations == 2)
    report = worker.captured()
    assert (report.problem, report.stored_bytes) == (None, sum(one.size for one in list_segments(folder)))
    assert report.oldest == min(one.time_seconds for one in records(folder))
    page = worker.get("/metrics").text
    assert f'specdecode_capture_stored_bytes{{model_name="fake"}} {float(report.stored_bytes)}' in page
    push(worker, None)
    ask(worker)
    worker.wait_until(lambda: not list(folder.iterdir()))
    assert worker.captured().conversations == 0
    assert 'specdecode_capture_stored_bytes{model_name="fake"} 0.0' in worker.get("/metrics").text
    assert worker.process.poll() is None


def test_listing_has_all_records_and_later_ones_in_other_segments(worker: WorkerProcess, folder: Path) -> None:
    push(worker, RULES)
    for stored in (1, 2):
        ask(worker)
        worker.wait_until(lambda: worker.captured().conversations == stored)  # noqa: B023  # read in this turn
        listed = admin(worker, Route.captures, token="captures").json()["segments"]
        assert [one["name"] for one in listed] == [one.path.name for one in list_segments(folder)]
        assert len(listed) == stored
    for one in listed:
        sent = admin(worker, f"{Route.captures}/{one['name']}", token="captures")
        assert hashlib.sha256(sent.content).hexdigest() == one["sha256"]
    ask(worker)
    worker.wait_until(lambda: worker.captured().conversations == 3)
    (newest,) = {one.path.name for one in list_segments(folder)} - {one["name"] for one in listed}
    assert admin(worker, f"{Route.captures}/{newest}", token="captures").status_code == 404, "it is still open"


@pytest.mark.parametrize(
    ("header", "metadata", "taken"),
    [(None, None, 0), ("on", None, 1), (None, True, 1), ("on", True, 1), ("on", False, 0), ("off", True, 0)],
)
def test_opt_in_needs_every_permission_that_is_given(
    header: str | None, metadata: bool | None, taken: int, worker: WorkerProcess, folder: Path
) -> None:
    push(worker, RULES.model_copy(update={"consent": "OptIn"}))
    dropped = worker.captured().dropped.get("opted_out", 0)
    more = {} if metadata is None else {"metadata": {"capture": metadata}}
    ask(worker, headers=None if header is None else {"X-Specdecode-Capture": header}, **more)
    ask(worker, headers={"X-Specdecode-Capture": "on"})
    worker.wait_until(lambda: worker.captured().conversations == taken + 1)
    assert all(one.permitted for one in records(folder))
    is_forbidden = (header, metadata) in [("on", False), ("off", True)]
    assert worker.captured().dropped.get("opted_out", 0) == dropped + is_forbidden, "silence is no refusal"


def test_records_of_a_user_are_deleted(worker: WorkerProcess, folder: Path) -> None:
    push(worker, RULES)
    for user in (ANN, "bob", ANN):
        ask(worker, user=user)
    worker.wait_until(lambda: worker.captured().conversations == 3)
    answer = admin(worker, Route.capture_deletions, "POST", json={"user": ANN})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"records": 2, "queued": 0, "segments": 1, "unreadable": 0, "undecidable": 0}
    assert worker.captured().conversations == len(records(folder)) == 1
    assert ANN not in worker.log, "no log has the user"


def test_only_the_operator_deletes_by_user(worker: WorkerProcess) -> None:
    for token in ("captures", "unknown"):
        answer = admin(worker, Route.capture_deletions, "POST", token, json={"user": "ann"})
        assert answer.status_code in (401, 403)
    assert admin(worker, Route.capture_deletions, "POST", json={"user": ""}).status_code == 400
    assert admin(worker, Route.capture_deletions, "POST", json={"name": "ann"}).status_code == 400
    assert admin(worker, Route.capture_deletions, token="operators").status_code == 403, "no segment has this name"


def add(folder: Path, content: bytes) -> str:
    name = segment_name(time.time() - 3600)
    (folder / name).write_bytes(content)
    return name


def test_segments_are_served_while_capture_is_on(worker: WorkerProcess, folder: Path) -> None:
    assert admin(worker, Route.captures, token="captures").status_code == 404
    push(worker, RULES.model_copy(update={"max_age_seconds": 7200.0}))
    worker.wait_until(lambda: (folder / RETENTION_FILE).exists())
    time.sleep(0.2)  # the rules are applied
    name = add(folder, MAGIC + os.urandom(1000))
    listing = admin(worker, Route.captures, token="captures").json()
    assert ([one["name"] for one in listing["segments"]], listing["max_age_seconds"]) == ([name], 7200.0)
    sent = admin(worker, f"{Route.captures}/{name}", token="captures")
    assert sent.content == (folder / name).read_bytes()
    push(worker, RULES.model_copy(update={"delete_before": time.time()}))
    worker.wait_until(lambda: not (folder / name).exists())
    assert admin(worker, f"{Route.captures}/{name}", token="captures").status_code == 404
    push(worker, None)
    assert admin(worker, Route.captures, token="captures").status_code == 404


def test_segment_that_is_deleted_while_it_is_pulled_ends(worker: WorkerProcess, folder: Path) -> None:
    push(worker, RULES)
    worker.wait_until(lambda: (folder / RETENTION_FILE).exists())
    time.sleep(0.2)  # the rules are applied
    name = add(folder, bytes(64 * 2**20))
    host, port = worker.admin.removeprefix("http://").split(":")
    request = f"GET {Route.captures}/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer captures\r\n\r\n"
    with socket.create_connection((host, int(port)), 30) as pulled:
        pulled.sendall(request.encode())
        assert pulled.recv(15) == b"HTTP/1.1 200 OK"
        push(worker, None)
        worker.wait_until(lambda: not (folder / name).exists())
        size = 0
        while piece := pulled.recv(2**20):
            size += len(piece)
    assert size < 64 * 2**20, "the rest of a deleted segment is not sent"
    assert "Traceback" not in worker.log
    ask(worker)


def test_mounted_plan_holds_from_the_start(model_folder: Path, tmp_path: Path) -> None:
    mounted, folder = tmp_path / "plan.json", tmp_path / "captures"
    mounted.write_text(Plan(uid="uid-1", version=1, capture=RULES).model_dump_json())
    with running(model_folder, folder, **{Env.plan_path: str(mounted)}) as worker:
        ask(worker, user=ANN)
        ask(worker)
        worker.wait_until(lambda: worker.captured().conversations == 2)
        worker.process.kill()
    old = [one.time_seconds for one in records(folder)]
    rules = RULES.model_copy(update={"delete_before": old[1]})
    mounted.write_text(Plan(uid="uid-1", version=2, capture=rules).model_dump_json())
    with running(model_folder, folder, **{Env.plan_path: str(mounted)}) as worker:
        worker.wait_until(lambda: worker.captured().conversations == 1)
        assert [one.time_seconds for one in records(folder)] == old[1:], "the others outlive the process"
        ask(worker)
        worker.wait_until(lambda: worker.captured().conversations == 2)
