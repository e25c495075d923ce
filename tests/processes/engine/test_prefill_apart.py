"""A prefill worker and a worker as processes: same text and acceptance, and no request is lost with the former.

Both run the embedded model with its EAGLE-3 head in a dtype in which a row does not depend on the batch, so that texts
and numbers of accepted draft tokens are compared exactly.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_kernels.cpu.native import library
from specdecode_worker.contract import Plan, TreeShape
from support.lossless.embedded import heldout_prompts
from support.processor import FASTEST_DTYPE
from support.tiers import by_effort, skip_reason
from support.worker_process import WorkerProcess, ready, real

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(library() is None, reason=skip_reason("native", "nothing is compiled here")),
]

COUNT = by_effort(quick=8, full=8, nightly=200)
FLAGS = (
    *("--model", "embedded://smollm2-135m-instruct", "--served-model-name", "smollm2", "--host", "127.0.0.1"),
    *("--max-num-seqs", "4", "--kv-cache-tokens", "6144", "--max-model-len", "1024", "--threads", "1"),
    *("--dtype", FASTEST_DTYPE),
)
AT_ONCE = 4
TOKENS = 24
ENVIRONMENT = {"SPECDECODE_ADMIN_TOKEN": "token-of-the-deployment"}


class Prefill:
    """A prefill worker that can end and start again, at the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._starts, self.port = folder, ExitStack(), 0, 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        log = self._folder / f"prefill-{self._starts}.log"
        flags = (*FLAGS, "--role", "prefill", "--block-port", str(self.port))
        self.worker = self._stack.enter_context(ready(real(flags, log, ENVIRONMENT)))
        self.port = int(re.search(r"block port: (\d+)", self.worker.log)[1])  # type: ignore[index]

    def kill(self) -> None:
        self._stack.close()

    def signal(self, number: int) -> None:
        for pid in self.worker.pids:
            os.kill(pid, number)


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefill]:
    made = Prefill(tmp_path_factory.mktemp("prefill"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with ready(real(FLAGS, tmp_path_factory.mktemp("worker") / "worker.log", ENVIRONMENT)) as started:
        yield started


VERSIONS = iter(range(1, 1000))


def ask_of(worker: WorkerProcess, peers: Sequence[str]) -> None:
    """Push a plan with one shape for all steps, and with these prefill workers."""
    shape = {"initial": TreeShape.chain(3), "max_depth": 3, "explore": 0, "guard": False}
    draft = worker.report().draft.hash
    worker.put_plan(Plan(draft=draft, version=next(VERSIONS), prefill=tuple(peers), **shape))


def prompt(index: int) -> str:
    """Return a prompt of several hundred tokens that shares no beginning with another one."""
    lines = [line["messages"][0]["content"] for line in heldout_prompts()]
    return f"Number {index}. " + " ".join(lines[(7 * index + k) % len(lines)] for k in range(16))


def complete(worker: WorkerProcess, index: int, salt: str) -> tuple[str, int, int]:
    """Return the text of a request, and its numbers of drafted and accepted tokens."""
    body = {"model": "smollm2", "prompt": prompt(index), "max_tokens": TOKENS, "seed": index, "cache_salt": salt,
            "temperature": (0.0, 0.8)[index % 2], "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{worker.public}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    counts: dict[str, Any] = result["metrics"]["speculative_decoding"]
    return result["choices"][0]["text"], counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]


def run(worker: WorkerProcess, salt: str, count: int = COUNT) -> list[tuple[str, int, int]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda index: complete(worker, index, salt), range(count)))


def counters(worker: WorkerProcess) -> tuple[int, int, int]:
    """Return how many requests asked for blocks, how many did not get them all, and the tokens that came."""
    report = worker.report()
    return report.remote_prefills, report.remote_prefill_failures, report.remote_prefill_tokens


def reasons(worker: WorkerProcess) -> str:
    """Return why requests went on without blocks."""
    return "\n".join(line for line in worker.log.splitlines() if "goes on without" in line)


@pytest.fixture(scope="module")
def local(worker: WorkerProcess) -> list[tuple[str, int, int]]:
    """Return the answers without a prefill worker."""
    ask_of(worker, ())
    return run(worker, "local")


def test_same_text_and_acceptance_as_with_a_local_prefill(
    prefill: Prefill, worker: WorkerProcess, local: list[tuple[str, int, int]]
) -> None:
    assert counters(worker) == (0, 0, 0)
    ask_of(worker, (f"127.0.0.1:{prefill.port}",))
    apart = run(worker, "apart")
    asked, failures, tokens = counters(worker)
    print(f"{asked} of {COUNT} requests asked, {failures} did not get all blocks, {tokens} tokens came")
    assert [text for text, *_ in apart] == [text for text, *_ in local]
    assert [counts for _, *counts in apart] == [counts for _, *counts in local]
    assert sum(accepted for *_, accepted in local) > COUNT, "drafts are accepted at all"
    assert asked > failures, reasons(worker)
    assert tokens >= 200 * (asked - failures), reasons(worker)


def wait_for_blocks(worker: WorkerProcess) -> None:
    """Wait until the prefill worker is asked, after a pause that follows a failure, and blocks come."""
    before, deadline = counters(worker)[2], time.monotonic() + 300
    while counters(worker)[2] == before:
        assert time.monotonic() < deadline, reasons(worker)
        run(worker, f"{time.monotonic()}")


def stop(prefill: Prefill) -> Callable[[], None]:
    prefill.signal(signal.SIGSTOP)
    return lambda: prefill.signal(signal.SIGCONT)


def kill(prefill: Prefill) -> Callable[[], None]:
    prefill.kill()
    return prefill.start


@pytest.mark.parametrize("fault", [stop, kill])
def test_lost_prefill_worker_costs_no_request(
    fault: Callable[[Prefill], Callable[[], None]],
    prefill: Prefill,
    worker: WorkerProcess,
    local: list[tuple[str, int, int]],
) -> None:
    ask_of(worker, (f"127.0.0.1:{prefill.port}",))
    wait_for_blocks(worker)
    asked, failures, _ = counters(worker)

    def harm() -> Callable[[], None]:
        deadline = time.monotonic() + 60
        while counters(worker)[0] < asked + 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return fault(prefill)

    with ThreadPoolExecutor(1) as pool:
        harming = pool.submit(harm)
        during = run(worker, fault.__name__)
    assert during == local, "same text and acceptance, whatever part of a prompt had come"
    assert counters(worker)[1] > failures, "the fault was in time"
    undo = harming.result()
    undo()
    wait_for_blocks(worker)
