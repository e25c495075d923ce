"""Clients that ask different questions with short answers and permit the capture of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import httpx
from harness.client_threads import ClientThreads
from harness.endpoint import MODEL

from specdecode_worker.capture import opening_hash
from specdecode_worker.training.data import prompts
from specdecode_worker.training.distillation.splits import split_of

ANSWER_TOKENS = 24


class Askers(ClientThreads):
    """Clients that ask different questions and permit the capture of them, while a block runs.

    They repeat the questions, with other answers, when all were asked.
    """

    def __init__(self, url: str, clients: int, splits: Mapping[str, int]) -> None:
        super().__init__(clients, join_seconds=120)
        self.asked = 0
        self.problems: list[str] = []
        self._url, self._questions = url, different_questions(splits)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                with self._lock:
                    number, self.asked = self.asked, self.asked + 1
                try:
                    self._ask(client, number)
                except httpx.HTTPError as error:
                    self.problems.append(f"{type(error).__name__}: {error}"[:300])
                    self._stop.wait(0.5)

    def _ask(self, client: httpx.Client, number: int) -> None:
        question = self._questions[number % len(self._questions)]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.8,
            "seed": number,
        }
        answer = client.post("/v1/chat/completions", json=body, headers={"X-Specdecode-Capture": "on"})
        answer.raise_for_status()


def different_questions(splits: Mapping[str, int]) -> list[str]:
    """Return questions of the prompt set, as many of each split as ``splits`` says, in random order."""
    rng, left, chosen = random.Random("askers"), Counter(splits), set[str]()
    while left.total() > 0:
        text = prompts.draw(rng).text
        split = split_of(opening_hash(text))
        if text not in chosen and left[split] > 0 and len(text) < 300:
            left[split] -= 1
            chosen.add(text)
    questions = sorted(chosen)
    rng.shuffle(questions)
    return questions
