"""Soak test: open-loop load with disconnecting and misbehaving clients while plan and draft are swapped.

It lasts 20 seconds; 300 with ``make proofs P=soak``. No request may fail or get stuck, equal requests
must get equal texts at all times, memory must stay constant, and every block must be freed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.contract import Plan, Report, Route, TreeShape
from support import small_model
from support.tiers import by_effort
from support.worker_process import WorkerProcess, real

SECONDS = by_effort(quick=20.0, full=20.0, nightly=300.0)
LONG = SECONDS >= 60
RATE = "1:60" if LONG else "1:16"
"""Range of the request rate, per second. A long run reaches the maximum number of concurrent clients."""
SWAP_SECONDS = min(5.0, SECONDS / 6)
SHAPES = ("chain:3", "none", "tree:4,2,1", "chain:6", "tree:8", "chain:1")

pytestmark = pytest.mark.timeout(SECONDS * 3 + 400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    target, one, two = (tmp_path_factory.mktemp(name) for name in ("target", "one", "two"))
    small_model.write_target(target)
    small_model.write_draft(one)
    small_model.write_draft(two, seed=2)
    return target, one, two


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    target, draft, _ = folders
    words = ["--model", f"file://{target}", "--draft", f"file://{draft}", "--served-model-name", "small"]
    # fp32, because in bf16 rounding depends on the batch size, and texts diverge at near ties.
    words += ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--max-num-seqs", "16"]
    with real(words, tmp_path_factory.mktemp("log") / "log") as started:
        started.wait_ready()
        yield started


class Swaps(threading.Thread):
    """Thread that pushes another plan and another draft every few seconds.

    ``refused`` collects the pushes that the worker did not accept.
    """

    def __init__(self, worker: WorkerProcess, drafts: tuple[Path, Path]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.plans = self.drafts = 0
        self.refused: list[str] = []
        self._worker, self._drafts = worker, drafts

    def run(self) -> None:
        while not self.done.wait(SWAP_SECONDS / 2):
            if (self.plans + self.drafts) % 2:
                self._put(Route.draft, {"method": "eagle3", "uri": f"file://{self._drafts[self.drafts % 2]}"})
                self.drafts += 1
            else:
                shape = TreeShape.parse(SHAPES[self.plans % len(SHAPES)])
                plan = Plan(version=self.plans + 1, initial=shape, max_depth=6, top_k=8, explore=0.1)
                self._put(Route.plan, plan.model_dump(mode="json"))
                self.plans += 1

    def _put(self, route: str, body: dict[str, Any]) -> None:
        answer = self._worker.call_admin(route, "PUT", json=body, timeout=60)
        if answer.status_code not in (200, 202):
            self.refused.append(f"{route}: {answer.status_code} {answer.text}")


def report(worker: WorkerProcess) -> Report:
    return Report.model_validate(worker.call_admin(Route.report, timeout=30).json())


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def load(worker: WorkerProcess, prompts: Path, seconds: float, seed: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "specdecode_worker", "load", "--url", worker.public, "--seconds", str(seconds)]
    words += ["--rate", RATE, "--max-tokens", "4:64", "--disconnect", "0.1", "--oversized", "0.05"]
    words += ["--garbage", "0.05", "--seed", str(seed), "--prompts", str(prompts), "--json"]
    completed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert completed.stdout, completed.stderr
    return json.loads(completed.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Write prompts of 1 to 150 tokens (one per byte), some of which share a prefix, and return the file."""
    texts = [("The same beginning, again and again. " * 4)[: 1 + 29 * i] + str(i) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return tmp_path / "prompts.jsonl"


def test_soak_has_no_failures_or_leaks(worker: WorkerProcess, folders: tuple[Path, Path, Path], prompts: Path) -> None:
    load(worker, prompts, min(SECONDS / 4, 20), seed=1)  # warm-up: one-time allocations happen here
    before = [resident_mib(pid) for pid in (worker.process.pid, worker.engine_pid)]
    swaps = Swaps(worker, folders[1:])
    swaps.start()
    summary = load(worker, prompts, SECONDS, seed=2)
    swaps.done.set()
    swaps.join(60)
    print(json.dumps(summary), f"{swaps.plans} plans, {swaps.drafts} drafts")
    assert summary["problems"] == []
    assert (summary["failed"], summary["differing_texts"]) == (0, 0)
    assert summary["most_concurrent"] == 64 or not LONG
    assert summary["repeated_requests"] > 10, "the comparison of texts must have something to compare"
    assert {"disconnect", "oversized", "garbage"} <= summary["by_kind"].keys()
    assert swaps.refused == []
    assert min(swaps.plans, swaps.drafts) >= 2
    worker.wait_until(lambda: (now := report(worker)).running + now.waiting == 0)
    assert report(worker).kv_tokens_used == 0, "blocks were not returned"
    after = [resident_mib(pid) for pid in (worker.process.pid, worker.engine_pid)]
    assert all(now < 1.1 * then + 40 for now, then in zip(after, before, strict=True)), (before, after)
