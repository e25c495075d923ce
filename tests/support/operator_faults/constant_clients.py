"""Constant traffic: clients that send one request after the other through a Service, each over a new connection."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import httpx

BODY = {"model": "stand-in", "messages": [{"role": "user", "content": "hello"}]}
PAUSE_SECONDS = 0.1


class ConstantClients:
    """Background clients, used as ``with ConstantClients(url) as clients: ...``; failures are collected."""

    def __init__(self, url: str, clients: int = 8) -> None:
        self.failures: list[str] = []
        self.answered = 0
        self._url = f"{url}/v1/chat/completions"
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self) -> None:
        with httpx.Client(timeout=20, trust_env=False, headers={"Connection": "close"}) as client:
            while not self._ended.wait(PAUSE_SECONDS):
                try:
                    status = client.post(self._url, json=BODY).status_code
                    problem = "" if status == 200 else str(status)
                except httpx.HTTPError as error:
                    problem = repr(error)
                with self._lock:
                    self.answered += not problem
                    self.failures += [f"{time.strftime('%T')} {problem}"] if problem else []
