"""Stand-in for a worker: serves the worker's ports and reports fabricated counters.

It runs in a pod with nothing but Python's standard library; the test mounts this file. ``PUT /behaviour`` with one of
BEHAVIOURS as the body selects the content of the next reports. ``exit`` ends the process, after which the kubelet
restarts it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DRAFT = "standin"
BEHAVIOURS = ("honest", "nan", "negative", "backwards", "garbage", "newer", "exit")
BOOT, BEGAN = uuid.uuid4().hex, time.monotonic()
settings: dict[str, Any] = {"behaviour": "honest", "plan": {"uid": "", "version": 0, "draft": "", "buckets": {}}}


def honest_report(clock: float) -> dict[str, Any]:
    """Return a plausible report: fifty drafts a second, half of them accepted. ``clock`` is in seconds."""
    drafts = int(50 * clock)
    cell = {"draft": DRAFT, "task": "other", "sampled": False, "parent": "main"}
    plan = {**settings["plan"], "matches_draft": settings["plan"]["draft"] == DRAFT}
    return {
        "contract_version": 1,
        "boot_id": BOOT,
        "worker": os.environ.get("POD_NAME", ""),
        "clock_seconds": clock,
        "draft": {"method": "eagle3", "hash": DRAFT},
        "plan": {key: plan[key] for key in ("uid", "version", "draft", "matches_draft", "buckets")},
        "running": 1,
        "running_request_seconds": clock,
        "drafts": drafts,
        "draft_tokens": drafts,
        "accepted_tokens": drafts // 2,
        "acceptance": [{**cell, "depth": 1, "ranks": [drafts // 2, 0, 0, 0, 0, 0, 0, 0, drafts - drafts // 2]}],
    }


def report() -> bytes:
    behaviour, fields = settings["behaviour"], honest_report(10 + time.monotonic() - BEGAN)
    misses = [0, 0, 0, 0, 0, 0, 0, 0, fields["drafts"]]
    if behaviour == "garbage":
        return b"x" * 1_000_000
    if behaviour == "newer":
        return json.dumps({**fields, "contract_version": 2, "mood": "good"}).encode()
    if behaviour in ("nan", "negative", "backwards"):  # these misses would change plans if accepted
        fields["acceptance"][0]["ranks"] = misses
        fields["accepted_tokens"] = 0
    if behaviour == "nan":
        fields["running_request_seconds"] = float("nan")
    if behaviour == "negative":
        fields["draft_tokens"] = -5
    if behaviour == "backwards":
        fields["drafts"] = 3
    return json.dumps(fields).encode()


class Public(BaseHTTPRequestHandler):
    """Handler of the public port: always ready and healthy."""

    def do_GET(self) -> None:
        self.answer(b"{}")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log, which probes would fill."""


class Admin(Public):
    """Handler of the admin port: serves the selected report and accepts plans."""

    def do_GET(self) -> None:
        self.answer(report() if self.path == "/v1/report" else json.dumps(settings["plan"]).encode())

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/plan":
            settings["plan"] = json.loads(body)
        elif body == b"exit":
            os._exit(0)
        else:
            settings["behaviour"] = body.decode()
        self.answer(b"{}")


if __name__ == "__main__":
    threading.Thread(target=ThreadingHTTPServer(("", 8001), Admin).serve_forever, daemon=True).start()
    ThreadingHTTPServer(("", 8000), Public).serve_forever()
