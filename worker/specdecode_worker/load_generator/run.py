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

from specdecode_worker.load_generator.client import Outcome, send_request
from specdecode_worker.load_generator.schedule import Profile, ScheduledRequest, schedule_requests

PROGRESS_SECONDS = 15
"""Interval of the progress lines on standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Server under load, and the requests' content and credentials."""

    url: str
    model: str
    prompts: Sequence[str]
    oversized_max_tokens: int
    """A max_tokens that exceeds the context length of the model."""
    api_key: str | None = None


class LoadRun:
    """All clients of a run.

    At most ``max_concurrency`` send at once; later requests wait locally and count as ``held_back``.
    """

    def __init__(self, target: LoadTarget, max_concurrency: int, timeout_seconds: float) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(max_concurrency)
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        # Open a connection per request, as many separate users do.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=target.url, timeout=timeout_seconds, limits=limits, headers=headers, trust_env=False
        )
        self.outcomes: list[Outcome] = []
        self.in_flight = self.max_in_flight = self.held_back = 0

    async def send(self, profile: Profile, seed: int) -> float:
        """Send all requests of the profile and return the seconds until the last one ended."""
        began = shown = time.monotonic()
        sending = []
        for request in schedule_requests(profile, self._target.prompts, seed):
            await asyncio.sleep(max(0.0, began + request.at_seconds - time.monotonic()))
            sending.append(asyncio.create_task(self._send_request(request)))
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._show(shown - began, profile)
        await asyncio.gather(*sending)
        await self._client.aclose()
        return time.monotonic() - began

    async def _send_request(self, request: ScheduledRequest) -> None:
        self.held_back += self._slots.locked()
        async with self._slots:
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            target = self._target
            self.outcomes.append(
                await send_request(
                    self._client, target.model, target.prompts[request.prompt], request, target.oversized_max_tokens
                )
            )
            self.in_flight -= 1

    def _show(self, seconds: float, profile: Profile) -> None:
        bad = sum(bool(outcome.problem) for outcome in self.outcomes)
        done = f"{len(self.outcomes)} done, {self.in_flight} in flight, {bad} failed"
        print(f"{seconds:.0f} of {profile.seconds:.0f} s: {done}", file=sys.stderr)


def summary(run: LoadRun, seconds: float) -> dict[str, Any]:
    """Return counts, latency percentiles (p50, p95, p99) and the most frequent problems.

    ``differing_texts`` is the number of requests that were repeated with different output; it must be 0.
    """
    outcomes = run.outcomes
    texts: dict[Any, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.text_hash and not outcome.problem:
            texts[outcome.request.key].add(outcome.text_hash)
    ok = [outcome for outcome in outcomes if outcome.status == 200 and not outcome.problem]
    return {
        "seconds": round(seconds, 1),
        "requests": len(outcomes),
        "by_kind": dict(Counter(outcome.request.kind.value for outcome in outcomes)),
        "failed": sum(bool(outcome.problem) for outcome in outcomes),
        "turned_away": sum(outcome.rejected for outcome in outcomes),
        "held_back": run.held_back,
        "most_concurrent": run.max_in_flight,
        "repeated_requests": sum(len(ok_key) > 0 for ok_key in texts.values()),
        "differing_texts": sum(len(distinct_texts) > 1 for distinct_texts in texts.values()),
        "output_tokens_per_second": round(sum(outcome.tokens for outcome in ok) / seconds, 1),
        "ttft_seconds": _percentiles([o.ttft_seconds for o in ok if o.ttft_seconds is not None]),
        "e2e_seconds": _percentiles([outcome.e2e_seconds for outcome in ok]),
        "problems": Counter(outcome.problem for outcome in outcomes if outcome.problem).most_common(10),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return (
        {f"p{p}": round(ordered[min(len(ordered) - 1, p * len(ordered) // 100)], 4) for p in (50, 95, 99)}
        if ordered
        else {}
    )
