"""Clients in threads that run while a block runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClientThreads(ABC):
    """Base of clients that ask, one request after the other, until the block ends.

    ``_lock`` guards what the clients share, and ``_stop`` is set when they have to end.
    """

    def __init__(self, clients: int, *, join_seconds: float) -> None:
        """Create the clients.

        Args:
            clients: Number of threads.
            join_seconds: Time that the end of the block waits for each of them.
        """
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._join_seconds = join_seconds
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._join_seconds)

    @abstractmethod
    def _run(self) -> None:
        """Ask until ``_stop`` is set."""
