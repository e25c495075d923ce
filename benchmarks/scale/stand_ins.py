"""All workers' admin ports as one HTTP proxy on loopback: the operator asks for any address, the proxy answers.

    python -m scale.stand_ins --port PORT

``PUT /busy`` with ``true`` or ``false`` starts and ends everybody's work; while nobody works, a report that is asked
for with the tag of the last one is answered with 304 and the clock alone, as a worker does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from aiohttp import web
from scale.modelled import DRAFT, counters

from specdecode_worker.contract import CONTRACT_VERSION, Header, Route

TICK_SECONDS = 1.0
"""Counters move in steps of this much work: reports between two of them are the same."""


class StandIns:
    """What all workers share, the seconds of work, and the plan that each of them took."""

    def __init__(self) -> None:
        self.plans: dict[str, dict[str, Any]] = {}
        self.counts = {"reports": 0, "unchanged": 0, "plans": 0}
        self._began = time.monotonic()
        self._busy_since: float | None = None
        self._busy_seconds = 60.0
        self._counters: tuple[int, dict[str, Any]] = (-1, {})

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/busy":
            self._work(json.loads(await request.read()))
            return web.json_response(self.counts)
        if request.path == Route.plan and request.method == "PUT":
            plan = json.loads(await request.read())
            self.plans[request.host] = {
                **{name: plan[name] for name in ("uid", "version", "draft", "buckets", "quiet")},
                "matches_draft": plan["draft"] == DRAFT,
            }
            self.counts["plans"] += 1
            return web.json_response(plan)
        if request.path == Route.report:
            return self._report(request)
        return web.Response(status=404)

    def _report(self, request: web.BaseRequest) -> web.Response:
        tick, found = self._now()
        plan = self.plans.get(request.host, {})
        clock = 100.0 + time.monotonic() - self._began
        tag = f'"{tick}-{plan.get("version", 0)}"'
        self.counts["reports"] += 1
        if request.headers.get("If-None-Match") == tag:
            self.counts["unchanged"] += 1
            return web.Response(status=304, headers={"ETag": tag, Header.clock_seconds: f"{clock:.3f}"})
        body = {
            "contract_version": CONTRACT_VERSION,
            "boot_id": f"boot-{request.host}",
            "worker": request.host,
            "clock_seconds": clock,
            "draft": {"method": "eagle3", "hash": DRAFT},
            "plan": plan,
            "max_num_seqs": 16,
            "kv_tokens_total": 100_000,
            **found,
        }
        return web.Response(body=json.dumps(body).encode(), headers={"ETag": tag}, content_type="application/json")

    def _now(self) -> tuple[int, dict[str, Any]]:
        tick = int(self._seconds() / TICK_SECONDS)
        if tick != self._counters[0]:
            self._counters = (tick, counters(tick * TICK_SECONDS))
        return self._counters

    def _seconds(self) -> float:
        since = self._busy_since
        return self._busy_seconds + (time.monotonic() - since if since is not None else 0)

    def _work(self, busy: bool) -> None:
        self._busy_seconds = self._seconds()
        self._busy_since = time.monotonic() if busy else None


async def serve(port: int) -> None:
    runner = web.ServerRunner(web.Server(StandIns().answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
