"""A stand-in worker: the ports of a worker, with behaviour that a test controls. Standard library only.

The test mounts this file into a pod. Port 8000 answers requests and probes, port 8001 reports and takes plans, and
port 8002 belongs to the test: ``PUT /behaviour`` with a JSON object changes BEHAVIOUR, ``GET /state`` returns
counts and the present plan.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BEHAVIOUR: dict[str, Any] = {
    "report": "honest",  # or "drip" (one byte a second), "hang" (accepts, never answers), "garbage", a key of FALSE
    "plan": "accept",  # or "hang"
    "ready": True,
    "draft": "draft-a",  # hash of the draft that reports name
    "drafts_per_second": 50,
    "acceptance": 0.5,
    "running": 0,
    "contract_version": 1,
    "check_tokens": False,
    "exit": False,
}
FALSE = {
    "nan": {"running_request_seconds": float("nan")},
    "negative": {"draft_tokens": -5},
    "backwards": {"drafts": 3},
}
"""Fields of false reports, which also say that no draft was accepted: if believed, they would change plans."""
DRAIN_SECONDS = float(os.environ.get("STAND_IN_DRAIN_SECONDS", "2"))
BOOT, STARTED = uuid.uuid4().hex, time.monotonic()
EMPTY_PLAN = {"uid": "", "version": 0, "draft": "", "buckets": {}}
lock = threading.Lock()
state: dict[str, Any] = {"plan": EMPTY_PLAN, "plans": [], "reports": 0, "unauthorized": 0, "requests": 0}
counters: dict[str, Any] = {"at": STARTED, "drafts": 0.0, "running_seconds": 0.0, "cells": {}}


def advance_counters() -> None:
    """Add what happened since the last call to the counters; they never fall."""
    now = time.monotonic()
    seconds, counters["at"] = now - counters["at"], now
    drafts = BEHAVIOUR["drafts_per_second"] * seconds
    counters["drafts"] += drafts
    counters["running_seconds"] += BEHAVIOUR["running"] * seconds
    hits, total = counters["cells"].get(BEHAVIOUR["draft"], (0.0, 0.0))
    counters["cells"][BEHAVIOUR["draft"]] = hits + BEHAVIOUR["acceptance"] * drafts, total + drafts


def report() -> bytes:
    """Return a report whose counters follow the behaviour."""
    with lock:
        advance_counters()
        plan, draft = state["plan"], BEHAVIOUR["draft"]
        cells = [
            {
                "draft": name,
                "task": "other",
                "sampled": False,
                "parent": "main",
                "depth": 1,
                "ranks": [int(hits), *([0] * 7), int(total) - int(hits)],
            }
            for name, (hits, total) in counters["cells"].items()
        ]
        drafts = int(counters["drafts"])
        accepted = sum(cell["ranks"][0] for cell in cells)
        document = {
            "contract_version": BEHAVIOUR["contract_version"],
            "boot_id": BOOT,
            "worker": os.environ.get("POD_NAME", ""),
            "clock_seconds": 10 + time.monotonic() - STARTED,
            "draft": {"method": "eagle3", "hash": draft},
            "plan": {**{key: plan[key] for key in EMPTY_PLAN}, "matches_draft": plan["draft"] == draft},
            "running": BEHAVIOUR["running"],
            "running_request_seconds": counters["running_seconds"],
            "max_num_seqs": 4,
            "drafts": drafts,
            "draft_tokens": drafts,
            "accepted_tokens": min(accepted, drafts),
            "acceptance": cells,
        }
    if BEHAVIOUR["report"] in FALSE:
        misses = [{**cell, "ranks": [0] * 8 + [sum(cell["ranks"])]} for cell in cells]
        document |= {"acceptance": misses, "accepted_tokens": 0, **FALSE[BEHAVIOUR["report"]]}
    return json.dumps(document).encode()


STARTED_WITH = os.environ.get("SPECDECODE_ADMIN_TOKEN", "")


def valid_tokens() -> set[str]:
    """Return the tokens that a worker accepts now: the variable from its start, and the mounted files."""
    tokens = {STARTED_WITH}
    config = json.loads(os.environ.get("SPECDECODE_CONFIG") or "{}")
    folder = config.get("server", {}).get("admin_tokens_path")
    for file in Path(folder).iterdir() if folder else ():
        if file.is_file():
            tokens |= {line.strip() for line in file.read_text().splitlines()}
    return tokens - {""}


class Handler(BaseHTTPRequestHandler):
    """Base of the three ports: answers of fixed length, no log."""

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log, which probes would fill."""


class Public(Handler):
    """Port 8000: probes and chat requests."""

    def do_GET(self) -> None:
        self.answer(b"{}", 503 if self.path == "/ready" and not BEHAVIOUR["ready"] else 200)

    def do_POST(self) -> None:
        self.body()
        state["requests"] += 1
        time.sleep(0.02)
        self.answer(json.dumps({"choices": [], "worker": os.environ.get("POD_NAME", "")}).encode())


class Admin(Handler):
    """Port 8001: the report and the plan, with the faults of the behaviour."""

    def do_GET(self) -> None:
        if not self.authorized():
            return
        if self.path != "/v1/report":
            self.answer(json.dumps(state["plan"]).encode())
            return
        state["reports"] += 1
        if BEHAVIOUR["report"] == "hang":
            time.sleep(3600)
        elif BEHAVIOUR["report"] == "drip":
            self.drip(report())
        elif BEHAVIOUR["report"] == "garbage":
            self.answer(b"x" * 1_000_000)
        else:
            self.answer(report())

    def do_PUT(self) -> None:
        if not self.authorized():
            return
        body = self.body()
        if BEHAVIOUR["plan"] == "hang":
            time.sleep(3600)
        if self.path == "/v1/plan":
            plan = json.loads(body)
            with lock:
                state["plan"] = {**EMPTY_PLAN, **plan}
                state["plans"].append([self.client_address[0], plan.get("version"), plan.get("draft")])
        self.answer(b"{}")

    def drip(self, body: bytes) -> None:
        """Send the body at one byte a second."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(1)

    def authorized(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not BEHAVIOUR["check_tokens"] or given in valid_tokens():
            return True
        state["unauthorized"] += 1
        self.answer(b'{"error": "unauthorized"}', 401)
        return False


class Control(Handler):
    """Port 8002: the test's own."""

    def do_GET(self) -> None:
        self.answer(json.dumps({**state, "behaviour": BEHAVIOUR}).encode())

    def do_PUT(self) -> None:
        with lock:
            advance_counters()
            BEHAVIOUR.update(json.loads(self.body()))
        if BEHAVIOUR["exit"]:
            os._exit(0)
        self.answer(b"{}")


class Server(ThreadingHTTPServer):
    """A server whose hanging handlers do not delay the end of the process."""

    daemon_threads = True
    request_queue_size = 64


def drain(*_: object) -> None:
    """Serve on while endpoints forget this pod, then exit."""
    BEHAVIOUR["ready"] = False
    threading.Timer(DRAIN_SECONDS, os._exit, (0,)).start()


if __name__ == "__main__":
    BEHAVIOUR.update(json.loads(os.environ.get("STAND_IN_BEHAVIOUR") or "{}"))
    signal.signal(signal.SIGTERM, drain)
    for port, handler in ((8001, Admin), (8002, Control)):
        threading.Thread(target=Server(("", port), handler).serve_forever, daemon=True).start()
    Server(("", 8000), Public).serve_forever()
