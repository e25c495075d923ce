"""Secrets that are read again when their files change, by a thread of their own.

A thread, because a file system that hangs must not stop the event loop, nor wait behind its other blocking calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from specdecode_worker.server.access.secret_files import Fingerprint, SecretFileError
from specdecode_worker.server.access.secret_set import SecretSet

CHECK_SECONDS = 1.0
"""Time between two examinations of the files."""

log = logging.getLogger(__name__)


class ReloadedSecrets:
    """Fixed secrets together with those of a path. ``current`` is replaced as a whole when the path changes."""

    def __init__(
        self,
        what: str,
        fixed: Mapping[str, str],
        read: Callable[[], Mapping[str, str]] | None = None,
        fingerprint: Callable[[], Fingerprint] = tuple,
    ) -> None:
        """Read the secrets for the first time.

        Args:
            what: Name of the option that holds the path, for the log.
            fixed: Secrets by name that never change.
            read: Reads the secrets of the path; None without a path.
            fingerprint: Examines the path without reading secrets.

        Raises:
            SecretFileError: The path has no usable secrets.
        """
        self._what, self._fixed, self._read, self._fingerprint = what, fixed, read, fingerprint
        self._problem = ""
        self._seen = fingerprint() if read else ()
        self.current = self._secrets()

    def reload(self) -> None:
        """Read the secrets again if their files changed. On an error the last good secrets stay, and it is logged."""
        if self._read is None:
            return
        try:
            # Taken before the files are read: a change in between is seen the next time.
            seen = self._fingerprint()
            if seen == self._seen and not self._problem:
                return
            self.current, self._seen = self._secrets(), seen
        except SecretFileError as error:
            if str(error) != self._problem:
                log.error("%s: %s; the last good ones stay in use", self._what, error)
            self._problem = str(error)
            return
        self._problem = ""
        log.info("%s: read again, %d are in use", self._what, len(self.current))

    def _secrets(self) -> SecretSet:
        return SecretSet({**(self._read() if self._read else {}), **self._fixed})


@contextlib.contextmanager
def watching(sources: Sequence[ReloadedSecrets]) -> Iterator[None]:
    """Read changed secrets again, every CHECK_SECONDS, while the block runs."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(CHECK_SECONDS):
            for source in sources:
                try:
                    source.reload()
                except Exception:
                    log.exception("cannot read secrets again; the last good ones stay in use")

    threading.Thread(target=watch, name="secrets", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
