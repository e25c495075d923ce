"""Constant traffic: clients that send one request after the other through a Service, each over a new connection."""

from __future__ import annotations

import time

import httpx

from support.client_threads import ClientThreads

BODY = {"model": "stand-in", "messages": [{"role": "user", "content": "hello"}]}
PAUSE_SECONDS = 0.1


class ConstantClients(ClientThreads):
    """Background clients, used as ``with ConstantClients(url) as clients: ...``; failures are collected."""

    def __init__(self, url: str, clients: int = 8) -> None:
        super().__init__(clients, join_seconds=30)
        self.failures: list[str] = []
        self.answered = 0
        self._url = f"{url}/v1/chat/completions"

    def _run(self) -> None:
        with httpx.Client(timeout=20, trust_env=False, headers={"Connection": "close"}) as client:
            while not self._stop.wait(PAUSE_SECONDS):
                try:
                    status = client.post(self._url, json=BODY).status_code
                    problem = "" if status == 200 else str(status)
                except httpx.HTTPError as error:
                    problem = repr(error)
                with self._lock:
                    self.answered += not problem
                    self.failures += [f"{time.strftime('%T')} {problem}"] if problem else []
