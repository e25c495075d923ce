"""Clients in threads that run while a block runs."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from typing import Self

import httpx

from support.kube import wait_for


class ClientThreads(ABC):
    """Base of clients that ask, one request after the other, until the block ends. Failures raise nothing.

    ``_lock`` guards what the clients share, and ``_stop`` is set when they have to end.
    """

    def __init__(self, clients: int, *, join_seconds: float, pause_seconds: float = 0) -> None:
        """Create the clients.

        Args:
            clients: Number of threads.
            join_seconds: Time that the end of the block waits for each of them.
            pause_seconds: Time from an answer to the next request.
        """
        self.answered = 0
        self.failures: list[str] = []
        """What went wrong, with the time of it."""
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._join_seconds, self._pause_seconds = join_seconds, pause_seconds
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._join_seconds)

    def count(self) -> int:
        """Return the number of requests that have ended."""
        with self._lock:
            return self.answered + len(self.failures)

    def wait_for_answers(self, more: int, timeout_s: float = 120) -> None:
        before = self.count()
        wait_for(f"{more} more answers", lambda: self.count() >= before + more, timeout_s=timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number = next(self._numbers)
            try:
                problem = self._ask(number)
            except (AssertionError, httpx.HTTPError) as error:
                problem = f"{type(error).__name__}: {error}"[:300]
            with self._lock:
                self.answered += not problem
                self.failures += [f"{time.strftime('%T')} {problem}"] if problem else []
            self._stop.wait(0.5 if problem else self._pause_seconds)

    @abstractmethod
    def _ask(self, number: int) -> str:
        """Send a request, the only one with this number, and return what is wrong with the answer."""
