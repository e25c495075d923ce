"""Reading of tenants' API keys and settings from a folder, as the kubelet mounts a Secret, or from one file.

The formats of keys are those of the worker's option --api-keys-path. In addition a file of a folder may hold several
keys, one a line: to rotate a key, add the new one, change the client, and remove the old one.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdecode_router.errors import RouterError
from specdecode_worker.http_edge import Fingerprint, fingerprint_of, mounted_files

SETTINGS_FILE = "tenants.json"
"""File of a folder that holds settings of tenants and no key."""
MAX_FILE_BYTES = 1 << 20
"""Largest file that is read. A Secret has at most 1 MiB."""
MAX_KEYS = 4096
"""Most keys of one path. Their files are examined every second."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")


class TenantFileError(RouterError):
    """Error for files that cannot be used; the message names the file, never a key."""


class TenantSettings(BaseModel):
    """Settings of one tenant in tenants.json."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    weight: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    """Share of the places, relative to the other tenants."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Priority of its requests: up to 0 interactive, above 0 batch."""
    max_in_flight: int | None = Field(default=None, ge=1, alias="maxInFlight")
    """Most requests on the workers at the same time."""


class _SettingsFile(BaseModel):
    """Content of tenants.json: settings by name of the tenant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenants: dict[str, TenantSettings]


def read_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a folder or of a file, without reading it.

    Raises:
        TenantFileError: The path cannot be examined.
    """
    try:
        return fingerprint_of(mounted_files(path) if path.is_dir() else [path])
    except OSError as error:
        raise _unreadable(path, error) from None


def read_keys(path: Path) -> dict[str, tuple[str, ...]]:
    """Read the keys of a folder (one file for each tenant) or of a file (one key a line).

    Returns:
        The keys by name of the tenant, at least one.

    Raises:
        TenantFileError: The path cannot be read, holds no key or an invalid one.
    """
    try:
        keys = _folder_keys(path) if path.is_dir() else _line_keys(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not keys:
        raise TenantFileError(f"{path} holds no key; write one, or leave the option out")
    if (count := sum(map(len, keys.values()))) > MAX_KEYS:
        raise TenantFileError(f"{path} holds {count} keys; at most {MAX_KEYS} are supported")
    return keys


def read_settings(path: Path) -> dict[str, TenantSettings]:
    """Read tenants.json of a folder. Without this file there are no settings.

    Raises:
        TenantFileError: The file cannot be read, or a field of it is wrong.
    """
    file = path / SETTINGS_FILE
    try:
        if not file.is_file():
            return {}
        return _SettingsFile.model_validate_json(_read_text(file)).tenants
    except OSError as error:
        raise _unreadable(file, error) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise TenantFileError(f"{file}: {place}: {first['msg']}; correct it, or delete the file") from None


def _folder_keys(folder: Path) -> dict[str, tuple[str, ...]]:
    keys = {}
    for file in mounted_files(folder):
        if file.name == SETTINGS_FILE:
            continue
        if not _NAME.fullmatch(file.name):
            raise TenantFileError(f"{file} is not named like a key: use letters, digits, '.', '_' and '-'")
        lines = [line.strip() for line in _read_text(file).splitlines() if line.strip()]
        if not lines:
            raise TenantFileError(f"{file} holds no key; write one, or delete it")
        keys[file.name] = tuple(_checked(line, str(file)) for line in lines)
    return keys


def _line_keys(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines of the form ``name=key`` or ``key``; the latter are named key-1, key-2 and so on.

    The ``=`` at the end of a key in base64 belongs to the key, not to a name.
    """
    keys: dict[str, tuple[str, ...]] = {}
    unnamed = 0
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name, _, key = (part.strip() for part in line.partition("="))
        if not key.strip("=") or not _NAME.fullmatch(name):
            unnamed += 1
            name, key = f"key-{unnamed}", line.strip()
        keys[name] = (*keys.get(name, ()), _checked(key, f"{path} line {number}"))
    return keys


def _read_text(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise TenantFileError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise TenantFileError(f"cannot read {file}: it is no UTF-8 text") from None


def _checked(key: str, place: str) -> str:
    if not all("!" <= character <= "~" for character in key):
        raise TenantFileError(f"{place}: a key is one word of printable ASCII characters")
    return key


def _unreadable(path: Path, error: OSError) -> TenantFileError:
    return TenantFileError(f"cannot read {path}: {error.strerror or error}")
