"""Tests of tenants and their keys: formats, authentication, reload, rotation and bad files."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from specdecode_router.errors import ApiError
from specdecode_router.queueing.tenants import Tenant, TenantTable
from specdecode_worker.http_edge import UnusableFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a mounted Secret with keys of two tenants, as the kubelet writes it."""
    folder = tmp_path / "keys"
    folder.mkdir()
    mount(folder, {"alice": "key-of-alice\n", "bob": "key-of-bob"})
    return folder


def mount(folder: Path, entries: dict[str, str]) -> None:
    """Replace the entries of a Secret like the kubelet: new files, then one renamed link, then links of entries."""
    version = folder / f"..{time.monotonic_ns()}"
    version.mkdir()
    for name, content in entries.items():
        (version / name).write_text(content)
    (folder / "..next").symlink_to(version.name)
    os.replace(folder / "..next", folder / "..data")
    for link in folder.iterdir():
        if not link.name.startswith("..") and link.name not in entries:
            link.unlink()
    for name in entries:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def name_of(table: TenantTable, key: str) -> str:
    return table.authenticate(f"Bearer {key}").name


def test_without_keys_every_client_is_the_same_tenant() -> None:
    assert TenantTable(None).authenticate("") == Tenant("")
    assert TenantTable(None).authenticate("Bearer any") == Tenant("")


def test_a_key_names_its_tenant(folder: Path) -> None:
    table = TenantTable(folder)
    assert (name_of(table, "key-of-alice"), name_of(table, "key-of-bob")) == ("alice", "bob")
    assert table.authenticate("bearer  key-of-bob ").name == "bob"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic key-of-bob", "key-of-bob", "Bearer \ud800", "Bearer k\x00"],
)
def test_other_headers_get_401_as_from_a_worker(folder: Path, header: str) -> None:
    with pytest.raises(ApiError) as raised:
        TenantTable(folder).authenticate(header)
    error = raised.value
    assert (error.status, error.kind, error.code) == (401, "authentication_error", "invalid_api_key")
    assert error.headers == {"WWW-Authenticate": "Bearer"}


def test_the_table_holds_no_key_in_clear(folder: Path) -> None:
    table = TenantTable(folder)
    state = repr([vars(table), table.current])
    assert "key-of-alice" not in state
    assert "key-of-bob" not in state


def test_a_file_of_lines_names_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("alice=one\n\nbob = two\nunnamed==\nalice=three\n")
    table = TenantTable(file)
    assert [name_of(table, key) for key in ("one", "two", "unnamed==", "three")] == ["alice", "bob", "key-1", "alice"]


def test_settings_are_read_and_have_defaults(folder: Path) -> None:
    settings = {"tenants": {"alice": {"weight": 3, "priority": 1, "maxInFlight": 8}}}
    mount(folder, {"alice": "a", "bob": "b", "tenants.json": json.dumps(settings, indent=1)})
    table = TenantTable(folder)
    assert table.authenticate("Bearer a") == Tenant("alice", 3, 1, 8)
    assert table.authenticate("Bearer b") == Tenant("bob", 1, 0, None)


def test_the_example_of_the_documentation_is_valid(folder: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "secure.md").read_text()
    example = page[page.index('    {"tenants"') : page.index("    }}") + 6]
    mount(folder, {"team-a": "a", "nightly": "n", "tenants.json": example})
    table = TenantTable(folder)
    assert table.authenticate("Bearer a") == Tenant("team-a", 3, 0, 64)
    assert table.authenticate("Bearer n") == Tenant("nightly", 1, 1, None)


def test_a_key_rotates_without_a_refused_request_and_removed_ones_are_refused(folder: Path) -> None:
    table = TenantTable(folder)
    mount(folder, {"alice": "key-of-alice\nnew-key\n", "bob": "key-of-bob"})
    table.refresh()
    assert name_of(table, "key-of-alice") == name_of(table, "new-key") == "alice"
    mount(folder, {"alice": "new-key"})
    table.refresh()
    assert name_of(table, "new-key") == "alice"
    for key in ("key-of-alice", "key-of-bob"):  # nor the key of a removed tenant
        with pytest.raises(ApiError):
            name_of(table, key)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "holds no key"),
        ({"alice": "  \n"}, "alice holds no key"),
        ({"alice": "two words"}, "one word of printable ASCII"),
        ({"al ice": "a"}, "not named like a key"),
        ({"alice": "x" * (1 << 20) + "x"}, "more than"),
        ({"alice": "a", "tenants.json": "{"}, "tenants.json: the file"),
        ({"alice": "a", "tenants.json": '{"tenants": {"alice": {"weight": 0}}}'}, "tenants.alice.weight"),
        ({"alice": "a", "tenants.json": '{"tenants": {"alice": {"weight": "2"}}}'}, "tenants.alice.weight"),
        ({"alice": "a", "tenants.json": '{"tenants": {"alice": {"wait": 1}}}'}, "tenants.alice.wait"),
        ({"alice": "a", "tenants.json": '{"alice": {}}'}, "tenants: Field required"),
    ],
)
def test_a_bad_file_stops_the_start_and_later_leaves_the_table(
    folder: Path, caplog: pytest.LogCaptureFixture, entries: dict[str, str], message: str
) -> None:
    table = TenantTable(folder)
    mount(folder, entries)
    with pytest.raises(UnusableFiles, match=message):
        TenantTable(folder)
    for _ in range(3):
        table.refresh()
    assert name_of(table, "key-of-bob") == "bob"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "last good table stays" in errors[0]
    assert "two words" not in errors[0]
    mount(folder, {"carol": "c"})
    table.refresh()
    assert name_of(table, "c") == "carol"


def test_settings_without_a_key_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount(folder, {"alice": "a", "tenants.json": '{"tenants": {"dave": {}}}'})
    TenantTable(folder)
    assert "dave" in caplog.text


def test_a_missing_path_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnusableFiles, match="cannot read"):
        TenantTable(tmp_path / "missing")
