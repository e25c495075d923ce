"""TLS of the router's port, with a certificate that is read again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from specdecode_router.errors import CannotStart

log = logging.getLogger(__name__)


class ServerCertificate:
    """Certificate and key of the port. A handshake takes the newest pair that could be read."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Read the files. Raises CannotStart if they cannot be used."""
        self._cert_file, self._key_file = Path(cert_file), Path(key_file)
        try:
            self._versions = self._read_versions()
            self._newest = self._load()
            self.context = self._load()
            """Context for the listener."""
        except (OSError, ValueError) as error:
            raise CannotStart(f"TLS certificate {cert_file} with key {key_file}: {error}") from None
        self.context.sni_callback = self._take_newest

    def refresh(self) -> None:
        """Read the files again if they changed. A pair that cannot be used is logged once, and the last one stays."""
        try:
            versions = self._read_versions()
            if versions == self._versions:
                return
            self._versions = versions
            self._newest = self._load()
        except (OSError, ValueError) as error:
            log.error("the changed TLS certificate cannot be used, the last one stays in use: %s", error)
        else:
            log.info("TLS certificate %s is read again", self._cert_file)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert_file, self._key_file, password=_refuse_password)
        return context

    def _read_versions(self) -> tuple[tuple[int, int], ...]:
        stats = [path.stat() for path in (self._cert_file, self._key_file)]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def _take_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this at every handshake, also where the client names no server.
        connection.context = self._newest


def _refuse_password() -> str:
    # Without a callback, OpenSSL asks for the password on the terminal.
    raise ValueError("the key is encrypted; store it without a password")
