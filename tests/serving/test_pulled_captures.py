"""Captured segments over the admin port: routes and bounds in worker processes, and the puller of ``distill``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.capture.puller import Pull, pull_segments, pull_source
from specdecode_worker.capture.records import CapturePullFailed
from specdecode_worker.capture.segments import segment_name, stored_retention
from specdecode_worker.contract import CaptureConfig, Route
from support.certificates import self_signed
from support.kube import wait_for
from support.processes import free_ports
from support.tiers import skip_reason
from support.worker_process import fake, worker_config

HOST = "workers.test"
MAX_AGE_SECONDS = 86400.0
TOKENS = {"operator": "operators", "router": "routers", "capture": "captures"}
Resolve = Callable[..., None]


@dataclass(frozen=True)
class Workers:
    """Two workers at 127.0.0.1 and 127.0.0.2 with the same admin port, and the folders that they capture to."""

    port: int
    folders: list[Path]

    def call(self, path: str = Route.captures, token: str = "captures", method: str = "GET") -> httpx.Response:
        """Call the first worker."""
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers)

    def pull(self, into: Path, token: str = "captures", max_bytes: int = 2**30) -> tuple[Pull, list[str]]:
        """Pull from all addresses that HOST resolves to. Return the result and the lines that were said."""
        lines: list[str] = []
        source = pull_source(f"{HOST}:{self.port}", token, None, max_bytes)
        return pull_segments(source, into, lines.append, lambda: False), lines


@contextlib.contextmanager
def capturing(
    model_folder: Path, tokens: Path, address: str, admin_port: int, folder: Path, **server: Any
) -> Iterator[None]:
    """Run a worker with the fake engine that captures traffic, on a loopback address and an admin port."""
    changed = {"host": address, "admin_port": admin_port, "admin_tokens_path": str(tokens), **server}
    capture = CaptureConfig(dir=str(folder), max_age_seconds=MAX_AGE_SECONDS)
    config = worker_config(model_folder, server=changed).model_copy(update={"capture": capture})
    # A recorder that opens its folder deletes segments that nobody can read. Until then it would delete those of tests.
    unreadable = folder / segment_name(time.time())
    folder.mkdir(mode=0o700)
    unreadable.touch()

    def is_listening() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((address, admin_port), 1).close()
            return True
        return False

    with fake(config, folder.with_suffix(".log")) as worker:
        worker.wait_until(lambda: not unreadable.exists() and is_listening(), 60)
        yield


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name, token in TOKENS.items():
        (folder / name).write_text(token)
    return folder


@pytest.fixture(scope="module")
def started(model_folder: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    base, (port,) = tmp_path_factory.mktemp("workers"), free_ports(1)
    made = [base / "one", base / "two"]
    with contextlib.ExitStack() as stack:
        for number, folder in enumerate(made, 1):
            stack.enter_context(capturing(model_folder, tokens, f"127.0.0.{number}", port, folder))
        yield Workers(port, made)


@pytest.fixture
def workers(started: Workers) -> Workers:
    """Return the workers, whose folders are empty."""
    for folder in started.folders:
        for path in folder.glob("*.segment"):
            path.unlink()
    return started


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Return a function that lets HOST resolve to some addresses, as a headless Service's name does."""
    regular = socket.getaddrinfo

    def resolve_to(*addresses: str) -> None:
        def answer(host: Any, port: Any, *args: Any, **more: Any) -> Any:
            if host != HOST:
                return regular(host, port, *args, **more)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", answer)

    return resolve_to


def add(folder: Path, content: bytes, age_seconds: float = 3600) -> str:
    """Add a segment of this age and return its name."""
    name = segment_name(time.time() - age_seconds)
    (folder / name).write_bytes(content)
    return name


def test_finished_segments_are_listed_and_sent(workers: Workers) -> None:
    content = os.urandom(700_000)
    name = add(workers.folders[0], content)
    listing = workers.call()
    assert listing.status_code == 200
    sha256 = hashlib.sha256(content).hexdigest()
    assert listing.json() == {
        "segments": [{"name": name, "size": len(content), "sha256": sha256}], "max_age_seconds": MAX_AGE_SECONDS,
    }  # fmt: skip
    sent = workers.call(f"{Route.captures}/{name}")
    assert (sent.status_code, sent.content, sent.headers["content-length"]) == (200, content, str(len(content)))


def test_rewritten_segment_has_another_hash(workers: Workers) -> None:
    name = add(workers.folders[0], b"before")
    first = workers.call().json()["segments"][0]["sha256"]
    other = workers.folders[0] / "other"
    other.write_bytes(b"after!")
    other.replace(workers.folders[0] / name)
    assert workers.call().json()["segments"][0]["sha256"] == hashlib.sha256(b"after!").hexdigest() != first


@pytest.mark.parametrize("token", ["operators", "routers"])
@pytest.mark.parametrize("below", ["", "/x", f"/{1e9:018.0f}-{'a' * 12}.segment"])
def test_only_the_scope_capture_reads_segments(workers: Workers, token: str, below: str) -> None:
    add(workers.folders[0], b"text of users")
    answer = workers.call(Route.captures + below, token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert workers.call(Route.captures + below, "unknown").status_code == 401


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_segments_cannot_be_changed(workers: Workers, method: str) -> None:
    name = add(workers.folders[0], b"kept")
    assert workers.call(f"{Route.captures}/{name}", method=method).status_code == 405
    assert (workers.folders[0] / name).read_bytes() == b"kept"


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2Fetc%2Fpasswd", "../one.log", "%2Fetc%2Fpasswd", "retention.json", "x.segment",
     f"{'9' * 18}-{'a' * 12}.segment"],
)  # fmt: skip
def test_other_files_are_unknown(workers: Workers, name: str) -> None:
    assert workers.call(f"{Route.captures}/{name}").status_code in (403, 404), "403: a path that the client resolved"


def test_links_pipes_and_unfinished_segments_are_unknown(workers: Workers, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", workers.folders[0]
    secret.write_text("no")
    link, pipe = segment_name(time.time() - 3600), segment_name(time.time() - 3601)
    (folder / link).symlink_to(secret)
    os.mkfifo(folder / pipe)
    young = add(folder, b"still open", age_seconds=200)
    assert workers.call().json()["segments"] == []
    for name in (link, pipe, young):
        assert workers.call(f"{Route.captures}/{name}").status_code == 404


def test_clients_that_do_not_read_hold_bounded_places(workers: Workers) -> None:
    name = add(workers.folders[0], bytes(64 * 2**20))
    request = f"GET {Route.captures}/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer captures\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", workers.port)))
            held.sendall(request.encode())
            assert held.recv(15) == b"HTTP/1.1 200 OK"
        fifth = workers.call(f"{Route.captures}/{name}")
        assert (fifth.status_code, fifth.json()["error"]["code"]) == (503, "too_many_transfers")
        assert workers.call().status_code == 200, "the reading thread waits for no client"
    wait_for("closed connections give their places back", lambda: workers.call(f"{Route.captures}/{name}").is_success)


def test_pull_fetches_each_segment_of_all_workers_once(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1", "127.0.0.2", "127.0.0.1")
    folders, into = workers.folders, tmp_path / "pulled"
    names = {add(folder, os.urandom(300_000)) for folder in folders for _ in range(2)}
    shared = add(folders[0], b"of a shared folder")
    (folders[1] / shared).write_bytes(b"of a shared folder")
    result, lines = workers.pull(into)
    assert (result.fetched, result.known, result.workers, result.skipped, lines) == (5, 1, 2, {}, [])
    for name in names:
        assert any(
            (folder / name).exists() and (folder / name).read_bytes() == (into / name).read_bytes()
            for folder in folders
        )
    retention = stored_retention(into)
    assert retention.max_age_seconds == MAX_AGE_SECONDS, "the text outlives its age nowhere"
    new = add(folders[1], b"new")
    again, _ = workers.pull(into)
    assert (again.fetched, again.known) == (1, 6)
    assert (into / new).stat().st_mode & 0o777 == 0o600


def test_pull_goes_on_where_a_killed_one_ended(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1")
    name = add(workers.folders[0], b"whole")
    (tmp_path / "left.segment.partial").write_bytes(b"who")
    (tmp_path / name).write_bytes(b"rewritten at the worker since")
    result, _ = workers.pull(tmp_path)
    assert (result.fetched, (tmp_path / name).read_bytes()) == (1, b"whole")
    assert not list(tmp_path.glob("*.partial"))


def test_worker_that_is_gone_is_skipped_and_named(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.9", "127.0.0.2")
    add(workers.folders[1], b"kept")
    result, lines = workers.pull(tmp_path)
    assert (result.fetched, result.workers, list(result.skipped)) == (1, 1, ["127.0.0.9"])
    assert "127.0.0.9" in lines[0]
    assert "refused" in lines[0]
    resolve("127.0.0.9")
    assert workers.pull(tmp_path)[0].workers == 0, "segments of an earlier pull are enough"
    with pytest.raises(CapturePullFailed, match=r"127\.0\.0\.9"):
        workers.pull(tmp_path / "empty")


def test_pull_stores_no_more_than_its_bound(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1")
    add(workers.folders[0], bytes(600), age_seconds=7200)
    newest = add(workers.folders[0], bytes(600))
    result, _ = workers.pull(tmp_path, max_bytes=1000)
    assert (result.fetched, result.over_bound) == (1, 1)
    assert [path.name for path in tmp_path.glob("*.segment")] == [newest]


def test_pull_near_its_bound_replaces_a_segment(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1")
    name = add(workers.folders[0], bytes(900))
    assert workers.pull(tmp_path, max_bytes=1000)[0].fetched == 1
    rewritten = workers.folders[0] / "rewritten"
    rewritten.write_bytes(bytes(800))
    rewritten.replace(workers.folders[0] / name)
    result, _ = workers.pull(tmp_path, max_bytes=1000)
    assert (result.fetched, result.over_bound, (tmp_path / name).stat().st_size) == (1, 0, 800)


def test_full_disk_ends_the_pull_with_its_cause(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1")
    add(workers.folders[0], bytes(300_000))
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip(skip_reason("root", "a file system cannot be mounted here"))
    try:
        with pytest.raises(CapturePullFailed, match="No space left") as raised:
            workers.pull(tmp_path)
        assert isinstance(raised.value.__cause__, OSError)
        assert not list(tmp_path.glob("*.segment"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("address", "token", "named"),
    [("nowhere", "t", "HOST:PORT"), ("ftp://a:1", "t", "HOST:PORT"), ("a:99999", "t", "HOST:PORT"),
     ("a:1", "", "SPECDECODE_CAPTURE_TOKEN"), ("a:1", "two words", "SPECDECODE_CAPTURE_TOKEN")],
)  # fmt: skip
def test_unusable_source_is_refused(address: str, token: str, named: str) -> None:
    with pytest.raises(CapturePullFailed, match=named):
        pull_source(address, token, None, 1)


def test_a_pull_that_is_stopped_before_a_worker_answers_has_not_failed(tmp_path: Path) -> None:
    """The run is only interrupted, and its Job's next pod goes on."""
    pull = pull_segments(pull_source("127.0.0.1:9", "t", None), tmp_path, print, lambda: True)
    assert (pull.workers, pull.skipped) == (0, {})


def test_first_line_of_a_rotated_token_counts() -> None:
    assert pull_source("a:1", "new\nold\n", None, 1).token == "new"


def test_wrong_token_is_reported(workers: Workers, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.1", "127.0.0.2")
    with pytest.raises(CapturePullFailed, match="answers 403"):
        workers.pull(tmp_path, token="routers")


def test_pull_over_tls_checks_the_signature(model_folder: Path, tokens: Path, tmp_path: Path, resolve: Resolve) -> None:
    resolve("127.0.0.3")
    (tmp_path / "other").mkdir()
    (certificate, key), (other, _) = (self_signed(made, "workers") for made in (tmp_path, tmp_path / "other"))
    (port,), folder = free_ports(1), tmp_path / "served"
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    with capturing(model_folder, tokens, "127.0.0.3", port, folder, **files):
        add(folder, b"secret")
        source = pull_source(f"{HOST}:{port}", "captures", str(certificate), 2**20)
        assert pull_segments(source, tmp_path / "pulled", print, lambda: False).fetched == 1
        for wrong in (
            pull_source(f"{HOST}:{port}", "captures", str(other), 2**20),
            pull_source(f"https://{HOST}:{port}", "captures", None, 2**20),
        ):
            with pytest.raises(CapturePullFailed, match=r"(?i)certificate"):
                pull_segments(wrong, tmp_path / "none", print, lambda: False)
