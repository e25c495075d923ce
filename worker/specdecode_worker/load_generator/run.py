"""Open-loop load run, and its summary.

Each request is sent at its scheduled time, even if earlier requests are still running.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from specdecode_worker.load_generator.client import Outcome, visit
from specdecode_worker.load_generator.schedule import Profile, Visit, visits

PROGRESS_SECONDS = 15
"""Interval of the progress lines on standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Server under load, and the requests' content and credentials."""

    url: str
    model: str
    prompts: Sequence[str]
    beyond: int
    """A max_tokens that exceeds the context length of the model."""
    api_key: str | None = None


class Crowd:
    """All clients of a run. At most ``most`` send at once; later requests wait locally and count as ``held_back``."""

    def __init__(self, aim: Aim, most: int, timeout_seconds: float) -> None:
        self._aim = aim
        self._places = asyncio.Semaphore(most)
        headers = {"Authorization": f"Bearer {aim.api_key}"} if aim.api_key else {}
        # Open a connection per request, as many separate users do.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=aim.url, timeout=timeout_seconds, limits=limits, headers=headers, trust_env=False
        )
        self.outcomes: list[Outcome] = []
        self.inside = self.most_inside = self.held_back = 0

    async def send(self, profile: Profile, seed: int) -> float:
        """Send all requests of the profile and return the seconds until the last one ended."""
        began = shown = time.monotonic()
        coming = []
        for one in visits(profile, self._aim.prompts, seed):
            await asyncio.sleep(max(0.0, began + one.at_seconds - time.monotonic()))
            coming.append(asyncio.create_task(self._one(one)))
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._show(shown - began, profile)
        await asyncio.gather(*coming)
        await self._client.aclose()
        return time.monotonic() - began

    async def _one(self, one: Visit) -> None:
        self.held_back += self._places.locked()
        async with self._places:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            aim = self._aim
            self.outcomes.append(await visit(self._client, aim.model, aim.prompts[one.prompt], one, aim.beyond))
            self.inside -= 1

    def _show(self, seconds: float, profile: Profile) -> None:
        bad = sum(bool(outcome.problem) for outcome in self.outcomes)
        text = (
            f"{seconds:.0f} of {profile.seconds:.0f} s: {len(self.outcomes)} done, {self.inside} inside, {bad} failed"
        )
        print(text, file=sys.stderr)


def summary(crowd: Crowd, seconds: float) -> dict[str, Any]:
    """Return counts, latency percentiles (p50, p95, p99) and the most frequent problems.

    ``differing_texts`` is the number of requests that were repeated with different output; it must be 0.
    """
    outcomes = crowd.outcomes
    texts: dict[Any, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.text_hash and not outcome.problem:
            texts[outcome.visit.key].add(outcome.text_hash)
    ok = [outcome for outcome in outcomes if outcome.status == 200 and not outcome.problem]
    return {
        "seconds": round(seconds, 1),
        "requests": len(outcomes),
        "by_kind": dict(Counter(outcome.visit.kind.value for outcome in outcomes)),
        "failed": sum(bool(outcome.problem) for outcome in outcomes),
        "turned_away": sum(outcome.turned_away for outcome in outcomes),
        "held_back": crowd.held_back,
        "most_concurrent": crowd.most_inside,
        "repeated_requests": sum(len(ok_key) > 0 for ok_key in texts.values()),
        "differing_texts": sum(len(found) > 1 for found in texts.values()),
        "output_tokens_per_second": round(sum(outcome.tokens for outcome in ok) / seconds, 1),
        "ttft_seconds": _percentiles([o.ttft_seconds for o in ok if o.ttft_seconds is not None]),
        "e2e_seconds": _percentiles([outcome.e2e_seconds for outcome in ok]),
        "problems": Counter(outcome.problem for outcome in outcomes if outcome.problem).most_common(10),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    found = sorted(values)
    return {f"p{p}": round(found[min(len(found) - 1, p * len(found) // 100)], 4) for p in (50, 95, 99)} if found else {}
