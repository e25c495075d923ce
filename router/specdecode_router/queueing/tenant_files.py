"""Reading of tenants' API keys and settings from a folder, as the kubelet mounts a Secret, or from one file.

The formats of keys are those of the worker's option --api-keys-path. In addition a file of a folder may hold several
keys, one a line: to rotate a key, add the new one, change the client, and remove the old one.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdecode_router.settings import first_problem
from specdecode_worker.http_edge import (
    MAX_KEYS,
    TENANT_SETTINGS,
    Fingerprint,
    UnusableFiles,
    checked_key,
    errors_naming,
    fingerprint_of,
    key_files,
    mounted_files,
    read_key_file,
    read_key_lines,
    read_text,
)


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
        UnusableFiles: The path cannot be examined.
    """
    with errors_naming(path):
        return fingerprint_of(mounted_files(path) if path.is_dir() else [path])


def read_keys(path: Path) -> dict[str, tuple[str, ...]]:
    """Read the keys of a folder (one file for each tenant) or of a file (one key a line).

    Returns:
        The keys by name of the tenant, at least one.

    Raises:
        UnusableFiles: The path cannot be read, holds no key or an invalid one.
    """
    with errors_naming(path):
        keys = _folder_keys(path) if path.is_dir() else _line_keys(path)
    if not keys:
        raise UnusableFiles(f"{path} holds no key; write one, or leave the option out")
    if (count := sum(map(len, keys.values()))) > MAX_KEYS:
        raise UnusableFiles(f"{path} holds {count} keys; at most {MAX_KEYS} are supported")
    return keys


def read_settings(path: Path) -> dict[str, TenantSettings]:
    """Read tenants.json of a folder. Without this file there are no settings.

    Raises:
        UnusableFiles: The file cannot be read, or a field of it is wrong.
    """
    file = path / TENANT_SETTINGS
    try:
        with errors_naming(file):
            return _SettingsFile.model_validate_json(read_text(file)).tenants if file.is_file() else {}
    except ValidationError as error:
        raise UnusableFiles(f"{file}: {first_problem(error)}; correct it, or delete the file") from None


def _folder_keys(folder: Path) -> dict[str, tuple[str, ...]]:
    keys = {}
    for file in key_files(folder):
        lines = [line.strip() for line in read_key_file(file).splitlines() if line.strip()]
        if not lines:
            raise UnusableFiles(f"{file} holds no key; write one, or delete it")
        keys[file.name] = tuple(checked_key(line, str(file)) for line in lines)
    return keys


def _line_keys(path: Path) -> dict[str, tuple[str, ...]]:
    keys: dict[str, tuple[str, ...]] = {}
    for name, key, _ in read_key_lines(path):
        keys[name] = (*keys.get(name, ()), key)
    return keys
