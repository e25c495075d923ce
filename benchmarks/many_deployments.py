"""200 deployments of 10 pods on a real API server: what the operator takes, writes, and how fast it follows.

etcd and kube-apiserver are real and alone (benchmarks/scale/api_server.py). Pods and the status of Deployments are made
by the benchmark, and all workers' reports are modelled and answered by one HTTP proxy on loopback. One after the other:
all is made while everybody works; everybody rests; at rest nothing may be written; one spec a second changes; the
operator starts anew.

    PYTHONPATH=operator:worker:benchmarks .venv/bin/python benchmarks/many_deployments.py --out benchmarks/results/STEM

The exit code is 1 where a target is missed. tests/operator_faults/test_scale.py runs it as a proof.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from scale.api_server import api_server, free_port
from scale.cluster_side import MERGE, RESOURCES, Api, Side, names_of
from scale.operator_side import Operator

from specdecode_kernels.cpu.native import cpu_name
from specdecode_operator.api.v1alpha1 import PLURAL

PROGRAMS = Path.home() / ".cache" / "specdecode" / "kubernetes-1.36.3"
TARGETS = {
    "resident_mib_most": 512.0,
    "objects_written_at_rest": 0.0,
    "write_requests_at_rest": 0.0,
    "change_seconds_p99": 1.0,
    "restart_seconds": 60.0,
}


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        port = free_port()
        server = stack.enter_context(api_server(folder, args.programs))
        stand_ins = subprocess.Popen([sys.executable, "-m", "scale.stand_ins", "--port", str(port)])
        stack.callback(stand_ins.wait)
        stack.callback(stand_ins.terminate)
        found = asyncio.run(Benchmark(args, Path(name)).run(server, f"http://127.0.0.1:{port}"))
        if args.keep_log:
            Path(args.keep_log).write_bytes((folder / "operator.log").read_bytes())
    document = {**described(), **vars_of(args), "targets": TARGETS, **found}
    print(json.dumps(document, indent=1))
    if args.out:
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        Path(args.out).with_suffix(".md").write_text(table(document))
    missed = [name for name, most in TARGETS.items() if document[name] > most]
    if missed:
        say(f"missed: {', '.join(f'{name} is {document[name]}, at most {TARGETS[name]:g}' for name in missed)}")
    return bool(missed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=200)
    parser.add_argument("--pods", type=int, default=10)
    parser.add_argument("--poll-seconds", type=float, default=5)
    parser.add_argument("--concurrency", type=int, default=16, help="deployments that are looked at at a time")
    parser.add_argument("--work-seconds", type=float, default=90, help="how long everybody works")
    parser.add_argument("--settle-seconds", type=float, default=200, help="from the end of work to the time at rest")
    parser.add_argument("--rest-seconds", type=float, default=600)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="folder with kube-apiserver")
    parser.add_argument("--keep-log", metavar="FILE", help="copy the operator's log there")
    parser.add_argument("--out", metavar="STEM")
    return parser.parse_args()


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "deployments": args.deployments,
        "pods_each": args.pods,
        "poll_seconds": args.poll_seconds,
        "concurrency": args.concurrency,
    }


class Benchmark:
    """The phases, each leaving its figures in ``found``."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.names = names_of(args.deployments)
        self.found: dict[str, Any] = {}
        self._peak = 0.0

    async def run(self, server: Any, proxy: str) -> dict[str, Any]:
        self.api, self.proxy = Api(server), proxy
        side = Side(self.api, self.args.pods)
        await self._busy(True)
        await side.install(self.names)
        controller = asyncio.create_task(side.run())
        await asyncio.sleep(3)

        def start() -> Operator:
            return Operator(server, proxy, self.folder, self.args.poll_seconds, self.args.concurrency)

        operator = start()
        try:
            await self._fill(operator, side, controller)
            await self._rest(operator)
            await self._change()
            self._measure(operator)
            operator.stop()
            operator = start()
            await self._restart(operator)
        finally:
            operator.stop()
            controller.cancel()
            await asyncio.gather(controller, return_exceptions=True)
            await self.api.close()
        return {**self.found, "resident_mib_most": round(self._peak, 1)}

    async def _fill(self, operator: Operator, side: Side, controller: asyncio.Task[None]) -> None:
        """Until all have children and pods; then everybody works for a while."""
        began = time.monotonic()
        while len(side.made) < len(self.names) or operator.reconciled() < len(self.names):
            if controller.done():
                controller.result()
            await self._sleep(2, operator)
        self.found["fill_seconds"] = round(time.monotonic() - began, 1)
        say(f"all made after {self.found['fill_seconds']} s, {self._peak:.0f} MiB")
        cpu = operator.cpu_seconds()
        await self._sleep(self.args.work_seconds, operator)
        self.found["cpu_share_at_work"] = round((operator.cpu_seconds() - cpu) / self.args.work_seconds, 3)
        say(f"worked at {self.found['cpu_share_at_work']} of a core, {self._peak:.0f} MiB")

    async def _rest(self, operator: Operator) -> None:
        await self._busy(False)
        await self._sleep(self.args.settle_seconds, operator)
        before, requests = await self.api.versions(), await self.api.write_requests()
        counts, looks, cpu = await self._busy(False), operator.looks(), operator.cpu_seconds()
        await self._sleep(self.args.rest_seconds, operator)
        after, later = await self.api.versions(), await self._busy(False)
        written = sorted(name for name in after if after[name] != before.get(name))
        reports = later["reports"] - counts["reports"]
        self.found |= {
            "rest_seconds": self.args.rest_seconds,
            "objects_written_at_rest": len(written),
            "written_at_rest": dict(Counter(name.split("/")[0] for name in written)),
            "write_requests_at_rest": await self.api.write_requests() - requests,
            "looks_at_rest": int(operator.looks() - looks),
            "reports_at_rest": reports,
            "unchanged_share": round((later["unchanged"] - counts["unchanged"]) / max(1, reports), 3),
            "cpu_share_at_rest": round((operator.cpu_seconds() - cpu) / self.args.rest_seconds, 3),
            "resident_mib_at_rest": round(operator.resident_mib()[0], 1),
        }
        say(f"at rest: {written[:3]} of {len(written)} written, {self.found['cpu_share_at_rest']} of a core")

    async def _change(self) -> None:
        """From the answer to our patch until a watch of ours sees the child: two watches are in it."""
        seen: dict[str, float] = {}

        async def look() -> None:
            async for found in self.api.watch("/api/v1/configmaps"):
                metadata = found["metadata"]
                seen[f"{metadata['namespace']}/{metadata['name']}"] = time.monotonic()

        watching = asyncio.create_task(look())
        await asyncio.sleep(3)
        asked: dict[str, float] = {}
        step = max(1, len(self.names) // self.args.changes)
        for namespace, name in self.names[::step][: self.args.changes]:
            path = f"{RESOURCES}/namespaces/{namespace}/{PLURAL}/{name}"
            await self.api.send("PATCH", path, {"spec": {"speculation": {"depth": {"max": 4}}}}, kind=MERGE)
            asked[f"{namespace}/{name}-plan"] = time.monotonic()
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        if watching.done():
            watching.result()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        took = sorted(seen[key] - at if seen.get(key, 0) > at else float("inf") for key, at in asked.items())
        for share in (50, 99):
            self.found[f"change_seconds_p{share}"] = round(took[min(len(took) - 1, len(took) * share // 100)], 3)
        self.found["changes_missed"] = sum(value == float("inf") for value in took)
        say(f"changes: p50 {self.found['change_seconds_p50']} s, p99 {self.found['change_seconds_p99']} s")

    async def _restart(self, operator: Operator) -> None:
        began = time.monotonic()
        while operator.reconciled() < len(self.names):
            await self._sleep(0.5, operator)
        self.found["restart_seconds"] = round(time.monotonic() - began, 1)
        say(f"all reconciled {self.found['restart_seconds']} s after a restart")
        self._measure(operator)
        await self._sleep(20, operator)

    async def _busy(self, busy: bool) -> dict[str, int]:
        """Starts or ends everybody's work; what the proxy has answered so far."""
        deadline = time.monotonic() + 20
        while True:
            try:
                async with aiohttp.request("PUT", f"{self.proxy}/busy", json=busy) as answer:
                    return dict(await answer.json())
            except OSError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.3)

    async def _sleep(self, seconds: float, operator: Operator) -> None:
        self._measure(operator)
        await asyncio.sleep(seconds)
        self._measure(operator)

    def _measure(self, operator: Operator) -> None:
        self._peak = max(self._peak, operator.resident_mib()[1])


def say(line: str) -> None:
    print(f"{time.strftime('%T')} {line}", file=sys.stderr, flush=True)


def described() -> dict[str, Any]:
    """Machine (no host name) and date."""
    return {"machine": f"{cpu_name()}, {os.cpu_count()} cores", "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def table(document: dict[str, Any]) -> str:
    rows = [
        "| measured | value | target |",
        "|---|---|---|",
        *(
            f"| {name} | {value} | {f'<= {TARGETS[name]:g}' if name in TARGETS else ''} |"
            for name, value in document.items()
            if isinstance(value, (int, float))
        ),
    ]
    title = f"# {document['deployments']} deployments of {document['pods_each']} pods"
    about = f"{document['machine']}, {document['date']}; made by benchmarks/many_deployments.py."
    return "\n".join([title, "", about, "", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
