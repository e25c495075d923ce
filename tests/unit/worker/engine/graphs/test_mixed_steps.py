"""Steps that mix decoding rows with prompt chunks: a graph and a pass of the chunks do what one eager pass does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from specdecode_worker.contract import Report, SyntheticKnobs
from specdecode_worker.core.messages import Logprobs, Submit, Tokens
from specdecode_worker.engine.cuda_graphs import (
    TOKENS_OF_ONE_READ,
    Captured,
    CudaGraphBackend,
    EagerBackend,
    EagerReason,
    Work,
    is_replay_faster,
)
from specdecode_worker.engine.engine import Engine, StepLauncher
from specdecode_worker.engine.scheduler import PrefillLimit
from specdecode_worker.guided.grammars import GrammarCompiler, regex_grammar
from support.char_tokenizer import END, tokenizer_json
from support.small_llama import engine_of, networks, plan_of, submit
from support.worker.accounts import check_engine

EVERY = 3
"""A request arrives every this many steps, so that its chunks run beside decoding rows."""
WANTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.6, "logit_bias": ((7, 3.0),)},
    "grammar": {"grammar": regex_grammar("[a-f]{3,9}(-[0-9]{2})+")},
}


def requests(**sampling: Any) -> list[Submit]:
    """Return six requests with prompts of several chunks. The last ones share a prefix with the first ones."""
    asked = [submit(i, sampled=i % 2 == 0, tokens=16, **sampling) for i in range(6)]
    prompts = [tuple((31 * (i % 4) + 7 * k) % 61 for k in range(40)) + one.prompt for i, one in enumerate(asked)]
    return [
        Submit(request_id=one.request_id, prompt=prompt, sampling=one.sampling)
        for one, prompt in zip(asked, prompts, strict=True)
    ]


def small_engine(*, graphs: bool, grammar: bool = False, pipelined: bool = False) -> Engine:
    return engine_of(
        networks(torch.float64),
        max_num_seqs=6,
        budget=32,
        backend=EagerBackend() if graphs else None,
        rows=(1, 2, 4, 6),
        pipelined=pipelined,
        grammars=GrammarCompiler(tokenizer_json, 61, (END,)) if grammar else None,
        eos_token_ids=(END,) if grammar else (),
    )


def serve(engine: Engine, asked: Sequence[Submit]) -> list[list[Tokens]]:
    """Return the messages of every step."""
    coming, steps = list(reversed(asked)), []
    while coming or not engine.idle:
        if coming and len(steps) % EVERY == 0:
            engine.add(coming.pop())
            wait([compiled for _, compiled in engine._grammars._waiting.values()])
        steps.append(engine.step())
    check_engine(engine)
    return steps


def parts_of(steps: list[list[Tokens]]) -> tuple[Any, list[float]]:
    """Return the messages without their log-probabilities, and these numbers."""
    numbers: list[float] = []

    def without(entries: Sequence[Logprobs]) -> list[Any]:
        for entry in entries:
            numbers.extend((entry.logprob, *entry.top_logprobs))
        return [(entry.token, entry.rank, entry.top_tokens) for entry in entries]

    results = [
        [
            (replace(new, logprobs=(), prompt_logprobs=()), without(new.logprobs), without(new.prompt_logprobs))
            for new in step
        ]
        for step in steps
    ]
    return results, numbers


def counted(report: Report) -> Any:
    """Return what the planner learns from a report, without times."""
    costs = [(cell.count, cell.x, cell.xx, cell.emitted) for cell in report.steps]
    ranks = sorted((cell.depth, cell.parent, cell.sampled, cell.ranks) for cell in report.acceptance)
    return sorted(costs), ranks, report.drafts, report.accepted_tokens, report.prefix_hit_tokens


@pytest.mark.parametrize(
    ("shape", "pipelined", "wanted"),
    [
        ("none", False, "logprobs"),
        ("none", True, "penalties"),
        ("chain:3", True, "logprobs"),
        ("chain:3", True, "grammar"),
        ("tree:2,2,1", False, "plain"),
        ("tree:2,2,1", True, "penalties"),
    ],
)
def test_every_step_has_the_results_of_an_eager_step(
    shape: str, pipelined: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillLimit, "record_step", lambda *_: None)  # chunks would follow the load of the machine
    results, logprobs = [], []
    for graphs in (True, False):
        engine = small_engine(graphs=graphs, pipelined=pipelined, grammar=wanted == "grammar")
        engine.set_plan(plan_of(shape))
        engine.set_synthetic(SyntheticKnobs(acceptance=(0.9, 0.6)))
        messages, numbers = parts_of(serve(engine, requests(**WANTED[wanted])))
        results.append((messages, counted(engine.report())))
        logprobs.append(numbers)
        if engine._graphs is not None:
            assert engine._graphs.mixed > 5
            assert set(engine._graphs.eager) == {EagerReason.PREFILL}
        assert engine.report().prefix_hit_tokens > 0 or "prompt_logprobs" in WANTED[wanted]
    assert results[0] == results[1]
    assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-9)


def test_the_graph_is_queued_before_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = small_engine(graphs=True), []

    def noting(name: str, right: Any) -> Any:
        return lambda *args, **named: (order.append(name), right(*args, **named))[1]

    for name in ("_replay", "_run"):
        monkeypatch.setattr(StepLauncher, name, noting(name, getattr(StepLauncher, name)))
    first, second = requests()[:2]
    engine.add(first)
    while not any(new.tokens for new in engine.step()):
        pass
    engine.add(second)
    order.clear()
    engine.step()
    assert order == ["_replay", "_run"]


class TimedBackend(EagerBackend):
    """Eager backend whose graphs take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def capture(self, work: Work) -> Captured:
        return Captured(work, self._seconds)


@pytest.mark.parametrize(("seconds", "mixed"), [(1e-4, True), (1.0, False)])
def test_the_measured_time_of_a_graph_decides(seconds: float, mixed: bool) -> None:
    engine = engine_of(networks(torch.float64), backend=TimedBackend(seconds), budget=32)
    serve(engine, requests()[:3])
    graphs = engine._graphs
    assert (graphs.mixed > 0) is mixed
    assert (EagerReason.MIXED in graphs.eager) is not mixed


@pytest.mark.parametrize(
    ("graph", "verify", "chunk", "layers", "passes", "faster"),
    [
        (0.8e-3, 0.8e-3, 100, 16, 0, True),  # 1B on an H200: the host is the slower one
        (0.8e-3, 0.8e-3, 2000, 16, 0, False),  # the chunk keeps the device busy while the host queues
        (4.1e-3, 4.1e-3, 100, 32, 0, False),  # 8B on an H200, plain: a second read of the weights takes longer
        (3.1e-3, 2.7e-3, 100, 32, 5, True),  # 8B on a B200, chain:5
        (3.1e-3, 2.7e-3, 100, 32, 0, False),  # no draft passes to save
        *(
            (2.5e-3, 2.5e-3, chunk, 31, 0, True) for chunk in (1, TOKENS_OF_ONE_READ)
        ),  # up to here chunks take the same time
        (2.5e-3, 2.5e-3, 2 * TOKENS_OF_ONE_READ, 31, 0, False),
    ],
)
def test_the_faster_way_is_chosen(
    graph: float, verify: float, chunk: int, layers: int, passes: int, faster: bool
) -> None:
    assert is_replay_faster(graph, verify, chunk, layers=layers, passes=passes) is faster


def test_the_time_of_a_graph_is_that_of_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that loads has queued a copy of 50 ms on the same stream. The device takes 7 ms for a replay."""
    device_milliseconds = [0.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = device_milliseconds[0]

        def synchronize(self) -> None:
            time.sleep(0.05)

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def replay() -> None:
        device_milliseconds[0] += 7

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.05))
    backend = CudaGraphBackend.__new__(CudaGraphBackend)
    assert backend.timed(replay).seconds == pytest.approx(0.007)
