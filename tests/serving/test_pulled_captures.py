"""Captured segments over the admin port: routes and bounds in worker processes, and the puller of ``distill``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.capture.puller import PullResult, pull_segments, pull_source
from specdecode_worker.capture.records import CapturePullFailed
from specdecode_worker.capture.segments import segment_name, stored_retention
from specdecode_worker.contract import Route
from support.capturing_workers import MAX_AGE_SECONDS, capturing, free_port
from support.kube import wait_for
from support.tiers import skip_reason

HOST = "workers.test"
TOKENS = {"operator": "operators", "router": "routers", "capture": "captures"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name, token in TOKENS.items():
        (folder / name).write_text(token)
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def folders(
    model_folder: Path, tokens: Path, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Path]]:
    """Run two workers at 127.0.0.1 and 127.0.0.2 and yield their capture folders."""
    base = tmp_path_factory.mktemp("workers")
    made = [base / "one", base / "two"]
    with contextlib.ExitStack() as stack:
        for number, folder in enumerate(made, 1):
            stack.enter_context(capturing(model_folder, tokens, f"127.0.0.{number}", port, folder))
        yield made


@pytest.fixture(autouse=True)
def empty(folders: list[Path]) -> None:
    for folder in folders:
        for path in folder.glob("*.segment"):
            path.unlink()


def add(folder: Path, content: bytes, age_seconds: float = 3600) -> str:
    """Add a segment of this age and return its name."""
    name = segment_name(time.time() - age_seconds)
    (folder / name).write_bytes(content)
    return name


def call(port: int, path: str = Route.captures, token: str = "captures", method: str = "GET") -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let HOST resolve to these addresses, as a headless Service's name does."""
    regular = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != HOST:
            return regular(host, port, *args, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def pull(port: int, folder: Path, token: str = "captures", max_bytes: int = 2**30) -> tuple[PullResult, list[str]]:
    lines: list[str] = []
    source = pull_source(f"{HOST}:{port}", token, None, max_bytes)
    return pull_segments(source, folder, lines.append, lambda: False), lines


def test_finished_segments_are_listed_and_sent(port: int, folders: list[Path]) -> None:
    content = os.urandom(700_000)
    name = add(folders[0], content)
    listing = call(port)
    assert listing.status_code == 200
    sha256 = hashlib.sha256(content).hexdigest()
    assert listing.json() == {
        "segments": [{"name": name, "size": len(content), "sha256": sha256}], "max_age_seconds": MAX_AGE_SECONDS,
    }  # fmt: skip
    sent = call(port, f"{Route.captures}/{name}")
    assert (sent.status_code, sent.content, sent.headers["content-length"]) == (200, content, str(len(content)))


def test_rewritten_segment_has_another_hash(port: int, folders: list[Path]) -> None:
    name = add(folders[0], b"before")
    first = call(port).json()["segments"][0]["sha256"]
    other = folders[0] / "other"
    other.write_bytes(b"after!")
    other.replace(folders[0] / name)
    assert call(port).json()["segments"][0]["sha256"] == hashlib.sha256(b"after!").hexdigest() != first


@pytest.mark.parametrize("token", ["operators", "routers"])
@pytest.mark.parametrize("below", ["", "/x", f"/{1e9:018.0f}-{'a' * 12}.segment"])
def test_only_the_scope_capture_reads_segments(port: int, folders: list[Path], token: str, below: str) -> None:
    add(folders[0], b"text of users")
    answer = call(port, Route.captures + below, token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert call(port, Route.captures + below, "unknown").status_code == 401


@pytest.mark.parametrize("path", [Route.report, Route.plan, Route.draft, Route.synthetic])
def test_capture_token_opens_nothing_else(port: int, folders: list[Path], path: str) -> None:
    assert call(port, path).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_segments_cannot_be_changed(port: int, folders: list[Path], method: str) -> None:
    name = add(folders[0], b"kept")
    assert call(port, f"{Route.captures}/{name}", method=method).status_code == 405
    assert (folders[0] / name).read_bytes() == b"kept"


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2Fetc%2Fpasswd", "../one.log", "%2Fetc%2Fpasswd", "retention.json", "x.segment",
     f"{'9' * 18}-{'a' * 12}.segment"],
)  # fmt: skip
def test_other_files_are_unknown(port: int, folders: list[Path], name: str) -> None:
    assert call(port, f"{Route.captures}/{name}").status_code in (403, 404), "403: a path that the client resolved"


def test_links_pipes_and_unfinished_segments_are_unknown(port: int, folders: list[Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("no")
    link, pipe = segment_name(time.time() - 3600), segment_name(time.time() - 3601)
    (folders[0] / link).symlink_to(secret)
    os.mkfifo(folders[0] / pipe)
    young = add(folders[0], b"still open", age_seconds=200)
    assert call(port).json()["segments"] == []
    for name in (link, pipe, young):
        assert call(port, f"{Route.captures}/{name}").status_code == 404


def test_clients_that_do_not_read_hold_bounded_places(port: int, folders: list[Path]) -> None:
    name = add(folders[0], bytes(64 * 2**20))
    request = f"GET {Route.captures}/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer captures\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            held.sendall(request.encode())
            assert held.recv(15) == b"HTTP/1.1 200 OK"
        fifth = call(port, f"{Route.captures}/{name}")
        assert (fifth.status_code, fifth.json()["error"]["code"]) == (503, "too_many_transfers")
        assert call(port).status_code == 200, "the reading thread waits for no client"
    wait_for("closed connections give their places back", lambda: call(port, f"{Route.captures}/{name}").is_success)


def test_pull_fetches_each_segment_of_all_workers_once(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.1")
    names = {add(folder, os.urandom(300_000)) for folder in folders for _ in range(2)}
    shared = add(folders[0], b"of a shared folder")
    (folders[1] / shared).write_bytes(b"of a shared folder")
    into = tmp_path / "pulled"
    result, lines = pull(port, into)
    assert (result.fetched, result.known, result.workers, result.skipped, lines) == (5, 1, 2, {}, [])
    for name in names:
        assert any(
            (folder / name).exists() and (folder / name).read_bytes() == (into / name).read_bytes()
            for folder in folders
        )
    retention = stored_retention(into)
    assert retention.max_age_seconds == MAX_AGE_SECONDS, "the text outlives its age nowhere"
    new = add(folders[1], b"new")
    again, _ = pull(port, into)
    assert (again.fetched, again.known) == (1, 6)
    assert (into / new).stat().st_mode & 0o777 == 0o600


def test_pull_goes_on_where_a_killed_one_ended(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1")
    name = add(folders[0], b"whole")
    (tmp_path / "left.segment.partial").write_bytes(b"who")
    (tmp_path / name).write_bytes(b"rewritten at the worker since")
    result, _ = pull(port, tmp_path)
    assert (result.fetched, (tmp_path / name).read_bytes()) == (1, b"whole")
    assert not list(tmp_path.glob("*.partial"))


def test_worker_that_is_gone_is_skipped_and_named(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.9", "127.0.0.2")
    add(folders[1], b"kept")
    result, lines = pull(port, tmp_path)
    assert (result.fetched, result.workers, list(result.skipped)) == (1, 1, ["127.0.0.9"])
    assert "127.0.0.9" in lines[0]
    assert "refused" in lines[0]
    resolve(monkeypatch, "127.0.0.9")
    assert pull(port, tmp_path)[0].workers == 0, "segments of an earlier pull are enough"
    with pytest.raises(CapturePullFailed, match=r"127\.0\.0\.9"):
        pull(port, tmp_path / "empty")


def test_pull_stores_no_more_than_its_bound(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1")
    add(folders[0], bytes(600), age_seconds=7200)
    newest = add(folders[0], bytes(600))
    result, _ = pull(port, tmp_path, max_bytes=1000)
    assert (result.fetched, result.over_bound) == (1, 1)
    assert [path.name for path in tmp_path.glob("*.segment")] == [newest]


def test_pull_near_its_bound_replaces_a_segment(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1")
    name = add(folders[0], bytes(900))
    assert pull(port, tmp_path, max_bytes=1000)[0].fetched == 1
    rewritten = folders[0] / "rewritten"
    rewritten.write_bytes(bytes(800))
    rewritten.replace(folders[0] / name)
    result, _ = pull(port, tmp_path, max_bytes=1000)
    assert (result.fetched, result.over_bound, (tmp_path / name).stat().st_size) == (1, 0, 800)


def test_full_disk_ends_the_pull_with_its_cause(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1")
    add(folders[0], bytes(300_000))
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip(skip_reason("root", "a file system cannot be mounted here"))
    try:
        with pytest.raises(CapturePullFailed, match="No space left") as raised:
            pull(port, tmp_path)
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


def test_first_line_of_a_rotated_token_counts() -> None:
    assert pull_source("a:1", "new\nold\n", None, 1).token == "new"


def test_wrong_token_is_reported(
    port: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.1", "127.0.0.2")
    with pytest.raises(CapturePullFailed, match="answers 403"):
        pull(port, tmp_path, token="routers")


def test_pull_over_tls_checks_the_signature(
    model_folder: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.3")
    certificate, key, other = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "other.pem"
    for made in (other, certificate):
        subject = ["-subj", "/CN=workers", "-addext", "subjectAltName=DNS:workers"]
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        subprocess.run([*words, "-keyout", key, "-out", made, "-days", "2", *subject], check=True, capture_output=True)
    port, folder = free_port(), tmp_path / "served"
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
