"""Reading of secrets from files: a folder as the kubelet mounts a Secret, or a file with one secret a line."""

from __future__ import annotations

import re
from pathlib import Path

from specdecode_worker.server.errors import ServerError

MAX_FILE_BYTES = 1 << 20
"""Largest file that is read. A Secret has at most 1 MiB."""
TENANT_SETTINGS = "tenants.json"
"""File in a folder of API keys that only routers read."""
MAX_SECRETS = 4096
"""Most secrets of one path. Their files are examined every second."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, inode, time of modification and size of every file of a path. It changes when a secret is replaced."""


class SecretFileError(ServerError):
    """Error for secrets that cannot be read; the message names the file, never its content."""


def read_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a folder or of a file, without reading a secret.

    Raises:
        SecretFileError: The path cannot be examined.
    """
    try:
        files = []
        for file in _files(path) if path.is_dir() else [path]:
            status = file.stat()
            files.append((file.name, status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(files)
    except OSError as error:
        raise SecretFileError(f"cannot read {path}: {error.strerror or error}") from None


def read_secrets(path: Path, *, first_number: int = 1, many: bool = False) -> dict[str, str]:
    """Read the secrets of a folder (one a file) or of a file (one a line).

    Args:
        path: Folder or file.
        first_number: Number in the name of the first secret without a name (``key-1``).
        many: A file of the folder may hold several secrets, one a line. Those after the first are named ``FILE/2``,
            ``FILE/3`` and so on.

    Returns:
        The secrets by name, at least one.

    Raises:
        SecretFileError: The path cannot be read, holds no secret or an invalid one.
    """
    try:
        secrets = _read_folder(path, many=many) if path.is_dir() else _parse_lines(path, _read_text(path), first_number)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no UTF-8 text"
        raise SecretFileError(f"cannot read {path}: {reason}") from None
    if not secrets:
        raise SecretFileError(f"{path} holds no key or token; write one, or leave the option out")
    if len(secrets) > MAX_SECRETS:
        raise SecretFileError(f"{path} holds {len(secrets)} keys; at most {MAX_SECRETS} are supported")
    return secrets


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that hold secrets, by name.

    The kubelet's own ``..data`` and other dot files are left out, and the routers' settings of tenants. So are links to
    files that an update of the Secret has removed, which exist for a moment.
    """
    return sorted(
        file
        for file in folder.iterdir()
        if not file.name.startswith(".") and file.name != TENANT_SETTINGS and file.is_file()
    )


def _read_folder(folder: Path, *, many: bool) -> dict[str, str]:
    secrets = {}
    for file in _files(folder):
        if not _NAME.fullmatch(file.name):
            raise SecretFileError(f"{file} is not named like a key: use letters, digits, '.', '_' and '-'")
        first, *others = _read_text(file).strip().splitlines() or [""] if many else [_read_text(file).strip()]
        secrets[file.name] = _checked(first.strip(), str(file))
        for number, line in enumerate(others, 2):
            secrets[f"{file.name}/{number}"] = _checked(line.strip(), f"{file} line {number}")
    return secrets


def _read_text(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise SecretFileError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    return content.decode()


def _parse_lines(path: Path, text: str, first_number: int) -> dict[str, str]:
    """Parse lines of the form ``name=key`` or ``key``.

    The ``=`` at the end of a key in base64 belongs to the key, not to a name.
    """
    secrets: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, key = (part.strip() for part in line.partition("="))
        if not key.strip("=") or not _NAME.fullmatch(name):
            name, key = f"key-{first_number}", line.strip()
            first_number += 1
        if name in secrets:
            raise SecretFileError(f"{path} line {number}: the name {name} occurs twice")
        secrets[name] = _checked(key, f"{path} line {number}")
    return secrets


def _checked(key: str, place: str) -> str:
    if not key:
        raise SecretFileError(f"{place} holds no key or token; write one, or delete it")
    if not all("!" <= character <= "~" for character in key):
        raise SecretFileError(f"{place}: a key is one word of printable ASCII characters")
    return key
