"""Clients that ask different questions with short answers and permit the capture of them."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from support.client_threads import ClientThreads
from support.e2e.endpoint import MODEL

ANSWER_TOKENS = 24


class Askers(ClientThreads):
    """Clients that ask different questions and permit the capture of them, while a block runs.

    They repeat the questions, with other answers, when all were asked.
    """

    def __init__(self, url: str, clients: int, questions: Sequence[str]) -> None:
        super().__init__(clients, join_seconds=120)
        self.asked = 0
        self.problems: list[str] = []
        self.questions = questions
        """They may be replaced at any time."""
        self._url = url

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number, self.asked = self.asked, self.asked + 1
            try:
                # A connection for each request, so that the Service spreads them over the workers.
                with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
                    self._ask(client, number)
            except httpx.HTTPError as error:
                self.problems.append(f"{type(error).__name__}: {error}"[:300])
                self._stop.wait(0.5)

    def _ask(self, client: httpx.Client, number: int) -> None:
        questions = self.questions
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": questions[number % len(questions)]}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.8,
            "seed": number,
        }
        answer = client.post("/v1/chat/completions", json=body, headers={"X-Specdecode-Capture": "on"})
        answer.raise_for_status()
