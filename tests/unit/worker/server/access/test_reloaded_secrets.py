"""Sets of secrets, and their reload: what changes apply and when the last good secrets stay."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import pytest

from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.server import admission as reloaded_secrets
from specdecode_worker.server.admission import (
    Fingerprint,
    ReloadedSecrets,
    SecretSet,
    bearer_token,
    watching,
)


class FakePath:
    """A path in memory: ``version`` is its fingerprint, ``problem`` the error of the next reads."""

    def __init__(self, **content: str) -> None:
        self.content, self.version, self.problem, self.reads = content, 0, "", 0

    def change(self, **content: str) -> None:
        self.content, self.version = content, self.version + 1

    def fingerprint(self) -> Fingerprint:
        return (("", 0, 0, self.version),)

    def read(self) -> Mapping[str, str]:
        self.reads += 1
        if self.problem:
            raise UnusableFiles(self.problem)
        return self.content


def test_set_finds_names_of_a_secret_and_nothing_else() -> None:
    secrets = SecretSet({"b": "one", "a": "one", "c": "two"})
    assert (secrets.names_of("one"), secrets.names_of("two")) == (("a", "b"), ("c",))
    assert secrets.names_of("") == secrets.names_of("On") == secrets.names_of("\udc80ü") == ()
    assert len(secrets) == 2
    assert "one" not in repr(vars(secrets))


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer x", "x"), ("bearer  x ", "x"), ("Basic x", None), ("x", None), ("Bearer ", None), ("Bearer", None)],
)
def test_bearer_token_is_read_from_the_header(header: str, token: str | None) -> None:
    assert bearer_token(header) == token


def test_changed_path_is_read_again_and_unchanged_path_is_not() -> None:
    path = FakePath(alice="1")
    secrets = ReloadedSecrets("keys", {"fixed": "f"}, path.read, path.fingerprint)
    secrets.refresh()
    assert path.reads == 1
    path.change(bob="2")
    secrets.refresh()
    assert secrets.current.names_of("2") == ("bob",)
    assert secrets.current.names_of("1") == ()
    assert secrets.current.names_of("f") == ("fixed",)


def test_unreadable_path_keeps_the_last_good_secrets_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    path = FakePath(alice="1")
    secrets = ReloadedSecrets("keys", {}, path.read, path.fingerprint)
    path.change()
    path.problem = "the folder is empty"
    with caplog.at_level(logging.INFO):
        secrets.refresh()
        secrets.refresh()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert secrets.current.names_of("1") == ("alice",)
    path.content, path.problem = {"alice": "3"}, ""
    with caplog.at_level(logging.INFO):
        secrets.refresh()  # the fingerprint is that of the failed read
    assert secrets.current.names_of("3") == ("alice",)
    assert caplog.records[-1].levelname == "INFO"


def test_unreadable_path_is_an_error_at_the_first_read() -> None:
    path = FakePath()
    path.problem = "nothing there"
    with pytest.raises(UnusableFiles, match="nothing there"):
        ReloadedSecrets("keys", {}, path.read, path.fingerprint)


def test_watching_survives_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloaded_secrets, "CHECK_SECONDS", 0.01)
    path = FakePath(alice="1")
    secrets = ReloadedSecrets("keys", {}, path.read, path.fingerprint)
    with watching([secrets]):
        path.content = None  # type: ignore[assignment]
        path.version += 1
        _wait_for(lambda: "cannot read secrets again" in caplog.text)
        path.change(bob="2")
        _wait_for(lambda: secrets.current.names_of("2") == ("bob",))
    time.sleep(0.05)
    reads = path.reads
    path.change(bob="3")
    time.sleep(0.05)
    assert path.reads == reads, "the thread goes on after the block"


def _wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
