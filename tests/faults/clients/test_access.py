"""API keys and admin tokens from files, and the salt of the prefix cache."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support import small_model
from support.faults.bounds import seconds_until
from support.faults.workers import SMALL_FLAGS
from support.worker_process import WorkerProcess, fake, ready, real, worker_config

RELOAD_SECONDS = 3
"""Bound of the time from a change of the mounted files to its effect."""
PROMPT = "The same system prompt, longer than some blocks, so that a second request can find it. "
BODY = {"model": "small", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}


def mount(folder: Path, files: dict[str, str]) -> Path:
    """Write ``files`` as the kubelet mounts a Secret; a later call replaces them by a swap of the link ``..data``."""
    data = folder / f"..{time.time_ns()}"
    data.mkdir(parents=True)
    for name, text in files.items():
        (data / name).write_text(text)
    (folder / "..data_tmp").symlink_to(data.name)
    os.replace(folder / "..data_tmp", folder / "..data")
    for link in folder.iterdir():
        if not link.name.startswith(".") and link.name not in files:
            link.unlink()
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    return folder


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_an_empty_key_refuses_to_start(small_folder: Path, tmp_path: Path) -> None:
    """A worker whose only key is empty would otherwise serve everyone."""
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--model", f"file://{small_folder}", "--port", "0"]
    words += ["--admin-port", "0", "--api-key", ""]
    variables = {**os.environ, "SPECDECODE_TERMINATION_LOG": str(tmp_path / "termination")}
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "holds no" in (tmp_path / "termination").read_text()


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, Path]]:
    """Yield a worker with the fake engine, and the folder with its mounted API keys and admin tokens."""
    folder = tmp_path_factory.mktemp("mounted")
    (folder / "model").mkdir()
    small_model.write_tokenizer(folder / "model")
    mount(folder / "keys", {"alice": "key-of-alice\n", "bob": "key-of-bob"})
    mount(folder / "tokens", {"operator": "all-of-it", "router": "internal-only", "capture": "segments-only"})
    paths = {"api_keys_path": str(folder / "keys"), "admin_tokens_path": str(folder / "tokens")}
    with ready(fake(worker_config(folder / "model", server=paths), folder / "log")) as worker:
        yield worker, folder


def test_replaced_keys_apply_without_a_restart(mounted: tuple[WorkerProcess, Path]) -> None:
    worker, folder = mounted

    def accepts(key: str) -> bool:
        return httpx.get(f"{worker.public}/v1/models", headers=bearer(key)).status_code == 200

    assert accepts("key-of-alice")
    assert not accepts("key-of-carol")
    mount(folder / "keys", {"alice": "next-key-of-alice", "carol": "key-of-carol"})
    took = seconds_until(lambda: accepts("key-of-carol") and accepts("next-key-of-alice"), 2 * RELOAD_SECONDS)
    assert not accepts("key-of-alice")
    assert not accepts("key-of-bob")
    print(f"replaced keys apply after {took:.2f} s")
    assert took <= RELOAD_SECONDS
    mount(folder / "keys", {})
    worker.wait_until(lambda: "the last good ones stay" in worker.log, RELOAD_SECONDS)
    assert accepts("key-of-carol")
    assert not re.search("key-of|all-of-it|internal-only", worker.log), "a secret is in the log"


ROUTES = {
    # method and path: tokens that may call it
    ("GET", "/v1/report"): {"all-of-it"},
    ("GET", "/internal/v1/load"): {"all-of-it", "internal-only"},
    ("POST", "/internal/v1/streams"): {"all-of-it", "internal-only"},
    ("GET", "/v1/plan"): {"all-of-it"},
    ("GET", "/v1/draft"): {"all-of-it"},
    ("GET", "/v1/synthetic"): {"all-of-it"},
    ("PUT", "/v1/draft"): {"all-of-it"},
    ("PUT", "/v1/plan"): {"all-of-it"},
    ("DELETE", "/v1/synthetic"): {"all-of-it"},
    ("GET", "/v1/unknown"): {"all-of-it"},
}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_token_opens_only_the_routes_of_its_scope(mounted: tuple[WorkerProcess, Path], method: str, path: str) -> None:
    worker, _ = mounted
    for token in ("all-of-it", "internal-only", "segments-only"):
        status = httpx.request(method, worker.admin + path, headers=bearer(token), content=b"{}").status_code
        assert (status != 403) == (token in ROUTES[method, path]), (token, status)
    for headers in ({}, bearer("wrong")):
        assert httpx.request(method, worker.admin + path, headers=headers).status_code == 401


def test_replaced_admin_token_applies_without_a_restart(mounted: tuple[WorkerProcess, Path]) -> None:
    worker, folder = mounted
    mount(folder / "tokens", {"operator": "new-token", "router": "internal-only", "capture": "segments-only"})

    def status(token: str) -> int:
        return httpx.get(f"{worker.admin}/v1/plan", headers=bearer(token)).status_code

    took = seconds_until(lambda: status("new-token") == 200, 2 * RELOAD_SECONDS)
    print(f"a replaced admin token applies after {took:.2f} s")
    assert took <= RELOAD_SECONDS
    assert status("all-of-it") == 401
    mount(folder / "tokens", {"operator": "all-of-it", "router": "internal-only", "capture": "segments-only"})
    seconds_until(lambda: status("all-of-it") == 200, 2 * RELOAD_SECONDS)


@pytest.fixture(scope="module")
def two_clients(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, Path]]:
    """Yield a worker with two API keys and no admin token, and the runtime folder of its user."""
    folder = tmp_path_factory.mktemp("two-clients")
    flags = ("--model", f"file://{small_folder}", *SMALL_FLAGS, "--api-key", "first-key", "second-key")
    environment = {"XDG_RUNTIME_DIR": str(folder), "SPECDECODE_TERMINATION_LOG": str(folder / "termination")}
    with ready(real(flags, folder / "log", environment)) as worker:
        yield worker, folder


def cached_tokens(worker: WorkerProcess, key: str, **fields: str) -> int:
    answer = httpx.post(f"{worker.public}/v1/completions", json=BODY | fields, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_reveal_no_other_client(two_clients: tuple[WorkerProcess, Path]) -> None:
    worker, _ = two_clients
    assert cached_tokens(worker, "first-key") == 0
    own, foreign = cached_tokens(worker, "first-key"), cached_tokens(worker, "second-key")
    assert own >= 16
    assert foreign == 0, f"one client sees {foreign} tokens of what another sent"
    salted = cached_tokens(worker, "first-key", cache_salt="of a tenant")
    print(f"cached tokens: {own} of the own prompt, {foreign} of another client's, {salted} with another salt")
    assert salted == 0
    assert cached_tokens(worker, "first-key", cache_salt="of a tenant") == own


def test_worker_without_a_token_makes_one_for_its_user(two_clients: tuple[WorkerProcess, Path]) -> None:
    worker, folder = two_clients
    assert httpx.get(f"{worker.admin}/v1/report").status_code == 401
    (file,) = folder.glob("**/*.token")
    assert str(file) in worker.log
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert len(token) >= 32
    assert token not in worker.log
    answer = httpx.get(f"{worker.admin}/v1/report", headers=bearer(token) | {"Host": "llama-worker.default.svc:8001"})
    assert answer.status_code == 200, answer.text


def test_host_header_opens_no_protected_path(two_clients: tuple[WorkerProcess, Path]) -> None:
    worker, _ = two_clients
    for host in ("x/health?", "x/health#", "x/metrics"):
        for path in ("/v1/models", "/v1/unknown", "/health/../v1/models", "//health"):
            answer = httpx.get(worker.public + path, headers={"Host": host})
            assert answer.status_code in (400, 401), (host, path, answer.status_code)
