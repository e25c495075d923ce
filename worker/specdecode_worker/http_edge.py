"""Parts of worker and router servers: a budget of bytes for bodies, TLS, and the files of a mounted Secret."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self


class BodyBudget:
    """Bytes that all bodies may hold together while they arrive. The default has no bound."""

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


# TLS of a server, with a certificate that is read again when its files change.

log = logging.getLogger(__name__)


class UnusableCertificate(ValueError):
    """Error for files that are no certificate with its key; the message names them."""


class TlsCertificate:
    """Certificate and key of the server, as a TLS context for listeners.

    Each handshake takes the newest certificate that could be read; open connections keep theirs.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Read the files.

        Raises:
            UnusableCertificate: A file cannot be read, or certificate and key do not belong together.
        """
        self._cert_file, self._key_file = cert_file, key_file
        try:
            self._fingerprint = self._read_fingerprint()
            self._newest = self._load()
        except (OSError, ValueError) as error:
            raise UnusableCertificate(f"TLS certificate {cert_file} with key {key_file}: {error}") from None
        self.context = self._load()
        """Context for the listeners."""
        self.context.sni_callback = self._take_newest

    @classmethod
    def of_files(cls, cert_file: str | None, key_file: str | None) -> TlsCertificate | None:
        """Return the certificate of two files; None without them. Raises UnusableCertificate."""
        return None if cert_file is None or key_file is None else cls(Path(cert_file), Path(key_file))

    def refresh(self) -> None:
        """Read the files again if they have changed. A pair that cannot be used leaves the certificate in use."""
        try:
            fingerprint = self._read_fingerprint()
            if fingerprint == self._fingerprint:
                return
            # Remember a bad pair too, so that it is logged once and not at every check.
            self._fingerprint = fingerprint
            self._newest = self._load()
        except (OSError, ValueError) as error:
            log.error("the changed TLS certificate %s cannot be used, the previous one stays: %s",
                      self._cert_file, error)  # fmt: skip
        else:
            log.info("TLS certificate %s is read again", self._cert_file)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert_file, self._key_file, password=_refuse_password)
        return context

    def _read_fingerprint(self) -> Fingerprint:
        return fingerprint_of((self._cert_file, self._key_file))

    def _take_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this at every handshake, also where the client names no server.
        connection.context = self._newest


def _refuse_password() -> str:
    # Without a callback, OpenSSL asks for the password on the terminal.
    raise ValueError("the key is encrypted; store it without a password")


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
