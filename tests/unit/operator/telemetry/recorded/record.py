"""Record reports of a real worker of some revision, for ``test_recorded_workers.py``.

    git worktree add --detach CHECKOUT REVISION
    python tests/unit/operator/telemetry/recorded/record.py CHECKOUT REVISION

The script starts that revision's ``specdecode-worker serve`` with the embedded model on loopback, pushes a plan that
today's contract wrote, and writes ``REVISION.json`` with the plan and two reports: one before and one after requests.
Run it with PYTHONPATH=worker in an environment that has the worker's packages.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.contract import Env, Plan, PlanRow, Route, TaskMatch, TreeShape

START_SECONDS = 240
TOKEN = "token-of-the-recording"
PROMPTS = ("def add(a, b):", "The capital of France is", "One, two, three,", "Write a short poem about rain.")
"""The first one belongs to the task ``code`` of the plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Record reports of a worker of another revision.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("revision")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(arguments.checkout.resolve(), Path(folder))
    path = Path(__file__).with_name(f"{arguments.revision}.json")
    path.write_text(json.dumps({"revision": arguments.revision, **recorded}, separators=(",", ":")) + "\n")


def record(checkout: Path, folder: Path) -> dict[str, Any]:
    log = folder / "worker.log"
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--port", "0", "--admin-port", "0", "--depth", "3"]
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HOSTNAME": "worker-0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{checkout / 'worker'}:{checkout / 'kernels'}",
        "XDG_RUNTIME_DIR": str(folder),
        Env.admin_token: TOKEN,
    }
    with log.open("wb") as out:
        process = subprocess.Popen([*words, "--threads", "1"], stdout=out, stderr=out, env=variables, cwd=folder)
    try:
        public, admin = (wait_for(log, rf"{name} port: (\S+)", process) for name in ("public", "admin"))
        wait_ready(public)
        with httpx.Client(base_url=admin, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
            return drive(client, public)
    finally:
        process.kill()
        process.wait()


def drive(client: httpx.Client, public: str) -> dict[str, Any]:
    plan = plan_for(client.get(Route.report).json())
    answer = client.put(Route.plan, content=plan.model_dump_json(), headers={"Content-Type": "application/json"})
    assert answer.status_code < 300, answer.text
    complete(public)
    before = client.get(Route.report).json()
    complete(public)
    after = client.get(Route.report).json()
    return {"plan": plan.model_dump(mode="json"), "reports": [anonymous(before), anonymous(after)]}


def plan_for(report: dict[str, Any]) -> Plan:
    """Return a plan of three drafted tokens at every load, for the draft that the worker runs."""
    rows = tuple(
        PlanRow(concurrency=concurrency, context=context, shape=TreeShape.chain(3))
        for concurrency in range(6)
        for context in range(3)
    )
    tasks = (TaskMatch(name="code", match="def "),)
    draft = report["draft"]["hash"]
    return Plan(draft=draft, version=7, rows=rows, max_depth=4, explore=0.05, guard=False, tasks=tasks)


def complete(public: str) -> None:
    for prompt in PROMPTS:
        body = {"model": model_of(public), "prompt": prompt, "max_tokens": 24}
        httpx.post(f"{public}/v1/completions", json=body, timeout=240).raise_for_status()


def model_of(public: str) -> str:
    return str(httpx.get(f"{public}/v1/models", timeout=60).json()["data"][0]["id"])


def anonymous(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "worker": "worker-0"}


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while (match := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return match[1]


def wait_ready(public: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while httpx.get(f"{public}/ready", timeout=10).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


if __name__ == "__main__":
    main()
