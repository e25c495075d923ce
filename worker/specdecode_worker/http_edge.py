"""Parts of worker and router servers: sockets, a budget of bytes for bodies, TLS, and files of keys that change."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

log = logging.getLogger(__name__)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on an address, with `::` on those of IPv4 too. Raise OSError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")


class BodyBudget:
    """Bytes that all bodies may hold together, each until its reservation ends. The default has no bound."""

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class BodyReservation:
    """Share of one body in the budget. It ends with the ``with`` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self.exceeded = False
        """True once the budget had no place for the body, which then holds nothing more."""

    def grow(self, count: int) -> bool:
        """Reserve ``count`` more bytes. Return False, and hold nothing, if the budget is or was exceeded."""
        if self.exceeded or self._budget.held_bytes + count > self._budget.max_bytes:
            self.exceeded = True
            self.release()
            return False
        self._held_bytes += count
        self._budget.held_bytes += count
        return True

    def release(self) -> None:
        """Return all reserved bytes to the budget."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


# Files that are read again when they change, as those of a mounted Secret.

Content = TypeVar("Content")
Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, inode, time of modification and size of files.

It changes when a file is replaced. A mounted Secret is replaced as a whole, which changes the inodes.
"""


def mounted_files(folder: Path) -> list[Path]:
    """Return the files of a folder by name.

    The kubelet's own ``..data`` and other dot files are left out. So are links to files that an update of the Secret
    has removed, which exist for a moment.
    """
    return sorted(file for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())


def fingerprint_of(files: Iterable[Path]) -> Fingerprint:
    """Return the fingerprint of files without reading them. Raise OSError if one cannot be examined."""
    statuses = ((file.name, file.stat()) for file in files)
    return tuple((name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in statuses)


class UnusableFiles(ValueError):
    """Error for files that cannot be used; the message names them, never a secret of them."""


class ReloadedFiles(Generic[Content]):
    """Content of files, in ``current``, which is replaced as a whole when they change. An error leaves it unchanged."""

    def __init__(
        self,
        what: str,
        read: Callable[[], Content],
        fingerprint: Callable[[], Fingerprint],
        *,
        stays: str = "the last good ones stay in use",
        summary: Callable[[Content], str] = lambda content: "",
    ) -> None:
        """Read the files for the first time.

        Args:
            what: Name of the files in messages.
            read: Reads the files.
            fingerprint: Examines the files without reading them.
            stays: Words of the log after an error.
            summary: Returns further words of the log for a content that was read again.

        Raises:
            UnusableFiles: The files cannot be read, or have a wrong content.
        """
        self._what, self._read, self._fingerprint, self._stays, self._summary = what, read, fingerprint, stays, summary
        self._problem = ""
        try:
            self._seen, self.current = fingerprint(), read()
        except UnusableFiles:
            raise
        except (OSError, ValueError) as error:
            raise UnusableFiles(f"{what}: {error}") from None

    def refresh(self) -> None:
        """Read the files again if they changed. On an error the last good content stays, and it is logged once."""
        try:
            # Taken before the files are read: a change in between is seen the next time.
            seen = self._fingerprint()
            if seen == self._seen and not self._problem:
                return
            self.current, self._seen = self._read(), seen
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                log.error("%s: %s; %s", self._what, error, self._stays)
            self._problem = str(error)
        else:
            self._problem = ""
            log.info("%s: read again%s", self._what, self._summary(self.current))


# Reading of keys: a folder as the kubelet mounts a Secret, or a file with one key a line.

TENANT_SETTINGS = "tenants.json"
"""File in a folder of API keys that holds no key. Only routers read it."""
MAX_FILE_BYTES = 1 << 20
"""Largest file that is read. A Secret has at most 1 MiB."""
MAX_KEYS = 4096
"""Most keys of one path. Their files are examined every second."""
_KEY_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Raise UnusableFiles with the name of a path for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise UnusableFiles(f"cannot read {path}: {error.strerror or error}") from None


def key_files(folder: Path) -> list[Path]:
    """Return the mounted files of a folder that hold keys: all but the routers' settings of tenants."""
    return [file for file in mounted_files(folder) if file.name != TENANT_SETTINGS]


def read_key_file(file: Path) -> str:
    """Return the text of a file that is named like its keys. Raises UnusableFiles, or OSError."""
    if not _KEY_NAME.fullmatch(file.name):
        raise UnusableFiles(f"{file} is not named like a key: use letters, digits, '.', '_' and '-'")
    return read_text(file)


def read_text(file: Path) -> str:
    """Return the text of a file of bounded size. Raises UnusableFiles, or OSError."""
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnusableFiles(f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UnusableFiles(f"cannot read {file}: it is no UTF-8 text") from None


def read_key_lines(path: Path, first_number: int = 1) -> Iterator[tuple[str, str, str]]:
    """Yield name, key and place of each line of the form ``name=key`` or ``key``.

    The latter are named key-1, key-2 and so on, from ``first_number``. The ``=`` at the end of a key in base64 belongs
    to the key, not to a name. Raises UnusableFiles, or OSError.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name, _, key = (part.strip() for part in line.partition("="))
        if not key.strip("=") or not _KEY_NAME.fullmatch(name):
            name, key = f"key-{first_number}", line.strip()
            first_number += 1
        place = f"{path} line {number}"
        yield name, checked_key(key, place), place


def checked_key(key: str, place: str) -> str:
    """Return a key that can be sent in a header. Raises UnusableFiles, which names its place."""
    if not key:
        raise UnusableFiles(f"{place} holds no key or token; write one, or delete it")
    if not all("!" <= character <= "~" for character in key):
        raise UnusableFiles(f"{place}: a key is one word of printable ASCII characters")
    return key


# TLS of a server.


class TlsCertificate(ReloadedFiles[ssl.SSLContext]):
    """Certificate and key of the server, as a TLS context for listeners.

    Each handshake takes the newest certificate that could be read; open connections keep theirs.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Read the files.

        Raises:
            UnusableFiles: A file cannot be read, or certificate and key do not belong together.
        """
        self._cert_file, self._key_file = cert_file, key_file
        super().__init__(
            f"TLS certificate {cert_file} with key {key_file}",
            self._load,
            lambda: fingerprint_of((cert_file, key_file)),
            stays="the previous one stays",
        )
        self.context = self._load()
        """Context for the listeners."""
        self.context.sni_callback = self._take_newest

    @classmethod
    def of_files(cls, cert_file: str | None, key_file: str | None) -> TlsCertificate | None:
        """Return the certificate of two files; None without them. Raises UnusableFiles."""
        return None if cert_file is None or key_file is None else cls(Path(cert_file), Path(key_file))

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert_file, self._key_file, password=_refuse_password)
        return context

    def _take_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this at every handshake, also where the client names no server.
        connection.context = self.current


def _refuse_password() -> str:
    # Without a callback, OpenSSL asks for the password on the terminal.
    raise ValueError("the key is encrypted; store it without a password")
