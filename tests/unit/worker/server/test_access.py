"""Credentials of a worker: from flags, environment and files, their reload, and the scopes of admin tokens."""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute

from specdecode_worker.contract import Env, Route, ServerConfig
from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS
from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.server import admission
from specdecode_worker.server.admission import (
    INTERNAL_PREFIX,
    Credentials,
    Fingerprint,
    ReloadedSecrets,
    Scope,
    SecretSet,
    allowed_scopes,
    bearer_token,
    load_credentials,
    prefix_salt,
    read_fingerprint,
    read_secrets,
    scope_of,
    token_file,
    watching,
)
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.routes.admin import admin_app
from support.waiting import until

ADMIN = {Env.admin_token: "admin"}


def load(flags: Sequence[str] = (), environ: dict[str, str] | None = None, **server: str) -> Credentials:
    return load_credentials(ServerConfig.model_validate(server), environ or {}, flags)


def test_without_keys_the_public_port_is_open_and_an_admin_token_is_made() -> None:
    credentials = load()
    assert credentials.api_keys is None
    assert credentials.admin_tokens.current.names_of(credentials.generated_token) == ("operator/environment",)


def test_keys_of_environment_flag_and_file_are_numbered_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("bob=b-key\nlast")
    credentials = load(["flag"], {Env.api_keys: "one  two\n"}, api_keys_path=str(tmp_path / "keys"))
    names = [credentials.api_keys.current.names_of(key) for key in ("one", "two", "flag", "b-key", "last", "none")]
    assert names == [("key-1",), ("key-2",), ("key-3",), ("bob",), ("key-4",), ()]


@pytest.mark.parametrize(
    ("flags", "environ", "problem"),
    [
        ((), {Env.api_keys: ""}, Env.api_keys),
        ((), {Env.api_keys: " \n\t"}, Env.api_keys),
        (("",), {}, "--api-key"),
        (("good", " "), {}, "--api-key"),
        ((), {Env.admin_token: ""}, Env.admin_token),
        ((), {Env.admin_token: "\n"}, Env.admin_token),
    ],
)
def test_given_but_blank_credentials_cannot_start(flags: tuple[str], environ: dict[str, str], problem: str) -> None:
    with pytest.raises(CannotStart, match=problem) as refused:
        load(flags, environ)
    assert "good" not in str(refused.value)


def test_paths_without_usable_secrets_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "operater").write_text("x")
    (tmp_path / "key-1").write_text("y")
    (tmp_path / "empty").mkdir()
    for fields, problem in (
        ({"api_keys_path": str(tmp_path / "none")}, "none: No such file"),
        ({"api_keys_path": str(tmp_path / "empty")}, "holds no key"),
        ({"admin_tokens_path": str(tmp_path)}, "holds no token"),
        ({"admin_tokens_path": str(tmp_path / "operater")}, "is no folder"),
    ):
        with pytest.raises(UnusableFiles, match=problem):
            load(**fields)
    with pytest.raises(UnusableFiles, match="the name key-1"):
        load(["flag"], api_keys_path=str(tmp_path))


def test_tokens_of_folder_and_environment_have_their_scopes(tmp_path: Path) -> None:
    for name in ("operator", "router", "unknown"):
        (tmp_path / name).write_text(f"token-{name}")
    credentials = load(environ=ADMIN, admin_tokens_path=str(tmp_path))
    names_of = credentials.admin_tokens.current.names_of
    assert (names_of("token-operator"), names_of("admin")) == (("operator",), ("operator/environment",))
    assert (names_of("token-router"), names_of("token-unknown")) == (("router",), ())
    assert not credentials.generated_token
    assert not load(admin_tokens_path=str(tmp_path)).generated_token


def test_file_of_a_scope_holds_several_tokens_during_a_rotation(tmp_path: Path) -> None:
    (tmp_path / "operator").write_text("current\nprevious\n")
    names_of = load(admin_tokens_path=str(tmp_path)).admin_tokens.current.names_of
    found = [names_of(token) for token in ("current", "previous", "current\nprevious")]
    assert found == [("operator",), ("operator/2",), ()]
    assert {scope_of(name) for token in ("current", "previous") for name in names_of(token)} == {Scope.operator}
    (tmp_path / "operator").write_text("two words\n")
    with pytest.raises(UnusableFiles, match="one word"):
        load(admin_tokens_path=str(tmp_path))


def test_token_file_is_private_and_deleted_at_the_end(tmp_path: Path) -> None:
    old = tmp_path / "specdecode" / "admin-8001.token"
    old.parent.mkdir()
    old.write_text("of a crashed worker")
    old.chmod(0o644)
    with token_file("secret", 8001, {"XDG_RUNTIME_DIR": str(tmp_path)}) as file:
        assert (file, file.read_text()) == (old, "secret\n")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(old.parent.iterdir()) == []
    with token_file("secret", 8001, {"XDG_RUNTIME_DIR": str(tmp_path)}) as file:
        file.write_text("of the next worker")
    assert file.exists()


def test_token_file_falls_back_to_the_cache_and_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    nowhere = {"XDG_RUNTIME_DIR": str(tmp_path / "file")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with token_file("secret", 1, nowhere) as file:
        assert file == tmp_path / "cache" / "specdecode" / "admin-1.token"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(admission.tempfile, "tempdir", str(tmp_path))
    with token_file("secret", 1, nowhere) as file:
        assert file.parent.parent == tmp_path
    monkeypatch.setattr(admission.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(CannotStart, match="SPECDECODE_ADMIN_TOKEN"), token_file("secret", 1, nowhere):
        pass


def test_folder_holds_one_key_per_file_and_dot_files_are_ignored(tmp_path: Path) -> None:
    data = tmp_path / "..2026"
    data.mkdir()
    (data / "alice").write_text("key-a\n")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "alice").symlink_to("..data/alice")
    (tmp_path / "bob.dev").write_text("key-b")
    (tmp_path / ".hidden").write_text("key-h")
    (tmp_path / "removed").symlink_to("..data/removed")
    (tmp_path / "folder").mkdir()
    assert read_secrets(tmp_path) == {"alice": "key-a", "bob.dev": "key-b"}


def test_settings_of_tenants_are_no_key_and_a_file_may_hold_two(tmp_path: Path) -> None:
    """Workers and routers mount the same Secret."""
    (tmp_path / "tenants.json").write_text('{"alice": {"weight": 2}}')
    (tmp_path / "alice").write_text("new-key\nold-key\n")
    assert read_secrets(tmp_path) == {"alice": "new-key", "alice/2": "old-key"}
    before = read_fingerprint(tmp_path)
    (tmp_path / "tenants.json").write_text("{}")
    assert read_fingerprint(tmp_path) == before


def test_file_holds_one_key_per_line_with_or_without_a_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=key-a\n\nplain\n  bob = key=b== \nc2VjcmV0==\nlast=\n")
    expected = {"alice": "key-a", "key-3": "plain", "bob": "key=b==", "key-4": "c2VjcmV0==", "key-5": "last="}
    assert read_secrets(file, first_number=3) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no key"),
        (" \n\n", "holds no key"),
        ("a=1x\na=2x", "line 2: the name a occurs twice"),
        ("two words", "line 1: a key is one word"),
        ("schlüssel", "line 1: a key is one word"),
        ("x" * (1 << 20 | 1), "has more than"),
        ("\n".join(f"k{i}" for i in range(5000)), "holds 5000 keys"),
    ],
)
def test_unusable_file_is_refused_without_its_content(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UnusableFiles, match=problem) as refused:
        read_secrets(file)
    assert "two words" not in str(refused.value)


@pytest.mark.parametrize(("name", "text"), [("alice", ""), ("alice", "a b"), ("al ice", "key"), ("alice~", "key")])
def test_unusable_file_of_a_folder_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "good").write_text("key")
    (tmp_path / name).write_text(text)
    with pytest.raises(UnusableFiles, match=name):
        read_secrets(tmp_path)


def test_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    for read in (read_secrets, read_fingerprint):
        with pytest.raises(UnusableFiles, match="none: No such file"):
            read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UnusableFiles, match="UTF-8"):
        read_secrets(tmp_path / "binary")


def test_fingerprint_changes_with_content_and_names(tmp_path: Path) -> None:
    seen = {read_fingerprint(tmp_path)}
    (tmp_path / "a").write_text("1")
    seen.add(read_fingerprint(tmp_path))
    (tmp_path / "next").write_text("2")
    (tmp_path / "next").replace(tmp_path / "a")
    seen.add(read_fingerprint(tmp_path))
    assert len(seen) == 3
    assert read_fingerprint(tmp_path) in seen


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


def test_watching_survives_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "CHECK_SECONDS", 0.01)
    path = FakePath(alice="1")
    secrets = ReloadedSecrets("keys", {}, path.read, path.fingerprint)
    with watching([secrets]):
        path.content = None  # type: ignore[assignment]
        path.version += 1
        until(lambda: "cannot read secrets again" in caplog.text)
        path.change(bob="2")
        until(lambda: secrets.current.names_of("2") == ("bob",))
    time.sleep(0.05)
    reads = path.reads
    path.change(bob="3")
    time.sleep(0.05)
    assert path.reads == reads, "the thread goes on after the block"


def test_every_admin_route_is_the_operators_but_those_of_captures_and_routers() -> None:
    app = admin_app(cast(Any, SimpleNamespace()), cast(Any, SimpleNamespace()), ReloadedSecrets("tokens", {}))
    routes = {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    others = {route for route in routes if allowed_scopes(*route) != {Scope.operator}}
    internal = {route for route in others if route[1].startswith(INTERNAL_PREFIX)}
    assert others - internal == {("GET", Route.captures), ("GET", f"{Route.captures}/{{name}}")}
    assert ("POST", INTERNAL_STREAMS) in internal


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("GET", "/internal/steps", {Scope.operator, Scope.router}),
        ("GET", Route.capture_deletions, {Scope.capture}),
        ("GET", "/v1/capturesx", {Scope.operator}),
        ("GET", "/v1/report/", {Scope.operator}),
        ("GET", "/internal", {Scope.operator}),
        ("GET", "/anything", {Scope.operator}),
    ],
)
def test_routes_have_scopes_and_unknown_routes_are_the_operators(method: str, path: str, scopes: set[Scope]) -> None:
    assert allowed_scopes(method, path) == scopes


def test_salts_separate_clients_and_tenants() -> None:
    pairs = [("", "a"), ("a", ""), ("a", "b"), ("b", "a"), ("a", "b\udc80"), ('a", "b', "")]
    salts = [prefix_salt(client, salt, shared=False) for client, salt in pairs]
    assert len({*salts, ""}) == len(pairs) + 1
    assert salts == [prefix_salt(client, salt, shared=False) for client, salt in pairs]


def test_without_keys_or_with_a_shared_cache_only_the_request_salts() -> None:
    assert prefix_salt("", "", shared=False) == prefix_salt("alice", "", shared=True) == ""
    assert prefix_salt("", "", shared=True, router_salt="alice") == ""
    assert prefix_salt("", "", shared=False, router_salt="alice") != prefix_salt(
        "", "", shared=False, router_salt="bob"
    )
    assert prefix_salt("alice", "x", shared=True) == prefix_salt("bob", "x", shared=True) != ""
