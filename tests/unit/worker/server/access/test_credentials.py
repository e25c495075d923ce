"""Credentials of a worker from flags, environment and files, and the token that is made where none is given."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdecode_worker.contract import Env, ServerConfig
from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.server import admission as generated_token
from specdecode_worker.server.admission import Credentials, Scope, load_credentials, scope_of, token_file
from specdecode_worker.server.errors import CannotStart

ADMIN = {Env.admin_token: "admin"}


def load(flags: Sequence[str] = (), environ: dict[str, str] | None = None, **server: str) -> Credentials:
    return load_credentials(ServerConfig.model_validate(server), environ or {}, flags)


def names(credentials: Credentials, *keys: str) -> list[tuple[str, ...]]:
    return [credentials.api_keys.current.names_of(key) for key in keys]


def test_without_keys_the_public_port_is_open_and_an_admin_token_is_made() -> None:
    credentials = load()
    assert credentials.api_keys is None
    assert credentials.admin_tokens.current.names_of(credentials.generated_token) == ("operator/environment",)


def test_keys_of_environment_flag_and_file_are_numbered_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("bob=b-key\nlast")
    credentials = load(["flag"], {Env.api_keys: "one  two\n"}, api_keys_path=str(tmp_path / "keys"))
    expected = [("key-1",), ("key-2",), ("key-3",), ("bob",), ("key-4",), ()]
    assert names(credentials, "one", "two", "flag", "b-key", "last", "none") == expected


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
    monkeypatch.setattr(generated_token.tempfile, "tempdir", str(tmp_path))
    with token_file("secret", 1, nowhere) as file:
        assert file.parent.parent == tmp_path
    monkeypatch.setattr(generated_token.tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(CannotStart, match="SPECDECODE_ADMIN_TOKEN"), token_file("secret", 1, nowhere):
        pass
