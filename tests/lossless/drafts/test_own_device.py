"""A draft in a process of its own proposes what a shared draft does, and its loss changes no text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from specdecode_worker.contract import DraftState, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.engine.cuda_graphs import OutsideReason
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts

LOCAL = {"own-eagle3": "eagle3-steep", "own-model": "draft-model"}
"""Shared form of each draft that runs in a process of its own."""
SHAPES = [TreeShape.parse(text) for text in ("chain:3", "tree:4,2,1", "none", "chain:1")]

Text = dict[str, list[int]]


def requests_of(count: int = 10, tokens: int = 40) -> list[Submit]:
    """Return requests with every kind of sampling; every third one has penalties, and two share a long prefix."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=tokens, shapes=len(SHAPES)) for i in range(count)]
    for i in range(0, count, 3):
        sampling = msgspec.structs.replace(
            requests[i].sampling, presence_penalty=0.8, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(3,)
        )
        requests[i] = msgspec.structs.replace(requests[i], sampling=sampling)
    prefix = tuple(range(48))
    for i in (1, count - 1):
        requests[i] = msgspec.structs.replace(requests[i], prompt=prefix + requests[i].prompt)
    return requests


def run(engine: Any, requests: Sequence[Submit], after: Callable[[int], None] = lambda steps: None) -> Text:
    """Run the requests, the second half of them behind the first, and return their tokens."""
    half, steps = len(requests) // 2, count()
    groups = requests[:half], requests[half:]
    first, second = (texts(engine, group, lambda _: after(next(steps))) for group in groups)
    return first | second


FEW_BLOCKS = {"max_num_seqs": 5, "blocks": 11, "budget": 40}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("own-eagle3", {}),
    ("own-model", {"pipelined": True}),
    ("own-model", FEW_BLOCKS),
    ("own-eagle3", {**FEW_BLOCKS, "pipelined": True}),
    ("own-eagle3", {"prefix_caching": False, "budget": 16}),
    ("own-model", {"prefix_caching": False, "budget": 16}),
]


@pytest.mark.parametrize(("method", "fields"), CASES, ids=str)
def test_proposals_equal_those_of_the_shared_draft(make_engine: Any, method: str, fields: dict[str, Any]) -> None:
    """Every request has as many drafts and accepted tokens as with the draft in the process of the target."""
    results = []
    for draft in (method, LOCAL[method], None):
        engine = make_engine(draft, **fields, plan=plan_of(SHAPES))
        text = run(engine, requests_of())
        report = engine.report()
        results.append((text, report.drafts, report.accepted_tokens, report.acceptance))
        assert engine.report().preemptions > 0 or "blocks" not in fields
    own, local, plain = results
    assert own == local
    assert own[0] == plain[0]
    assert own[2] > 0


@pytest.mark.parametrize("method", LOCAL)
def test_the_draft_runs_before_a_graph_that_verifies(make_engine: Any, plain: Any, method: str) -> None:
    wanted = plain(requests_of())
    engine = make_engine(method, graphs=(2, 8), plan=plan_of(SHAPES[:2]))
    assert run(engine, requests_of()) == wanted
    assert engine._graphs.outside[OutsideReason.METHOD] > 10


@pytest.mark.parametrize("method", LOCAL)
@pytest.mark.parametrize("first", ["copy", "own"])
def test_own_and_shared_drafts_replace_each_other(
    make_engine: Any, plain: Any, drafter: Any, method: str, first: str
) -> None:
    """The text is the same when a shared draft is replaced by one in a process of its own, and back."""
    requests = requests_of()
    wanted = plain(requests)
    order = [method, "copy", method] if first == "own" else ["copy", method, "copy"]
    engine = make_engine(order[0], plan=plan_of(SHAPES))

    def swap(step: int) -> None:
        if step in (7, 30):
            name = order[1] if step == 7 else order[2]
            engine.set_draft("", LoadedDraft(drafter(engine, name), DraftState(hash=f"{step}")))
            engine.set_plan(plan_of(SHAPES, version=step, draft=f"{step}"))

    assert run(engine, requests, swap) == wanted


@pytest.fixture
def own_engine(make_engine: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return an engine whose draft process nothing else uses."""
    pair = request.getfixturevalue("pair")
    running, pair.own.running = pair.own.running, {}
    engine = make_engine(request.param, plan=plan_of(SHAPES[:2]))
    yield engine
    pair.own.close()
    pair.own.running = running


def drafter_in(engine: Any) -> Any:
    return engine._drafts.loaded().drafter


def pid_of(engine: Any) -> int:
    return drafter_in(engine)._supervisor._process.pid


def wait_for_restart(engine: Any, seconds: float = 120) -> None:
    """Wait until a restarted process is ready; the engine takes it over in its next step."""
    deadline = time.monotonic() + seconds
    while drafter_in(engine)._supervisor._restarted is None:
        assert time.monotonic() < deadline, engine.report().draft.problem
        time.sleep(0.05)


@pytest.mark.parametrize("own_engine", LOCAL, indirect=True)
@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
def test_a_killed_process_fails_no_request_and_comes_back(
    own_engine: Any, make_engine: Any, plain: Any, pipelined: bool
) -> None:
    """Prefixes that were cached before the loss are no longer taken for known to the draft."""
    engine, requests = own_engine, requests_of()
    wanted = plain(requests)
    engine._ahead = 1 if pipelined else 0
    pid, problems = pid_of(engine), set()

    def kill(step: int) -> None:
        if step == 12:
            os.kill(pid, signal.SIGKILL)
        problems.add(engine.report().draft.problem)

    assert run(engine, requests, kill) == wanted
    problem = next(one for one in problems if one)
    assert "ended with exit code -9; requests decode plainly, and it starts again" in problem
    wait_for_restart(engine)
    marks = marked_blocks(engine)
    engine.add(requests[0])
    engine.step()
    assert marks > marked_blocks(engine) == 0
    while not engine.idle:
        engine.step()
    before = engine.report().accepted_tokens
    assert run(engine, requests) == wanted
    report = engine.report()
    assert report.draft.problem is None
    assert report.accepted_tokens > before
    assert pid_of(engine) != pid


def marked_blocks(engine: Any) -> int:
    """Return the number of cached blocks that are taken to have keys of the draft."""
    index = engine._scheduler.reuse._index
    return sum(index.is_marked(block, "d") for block in range(200))


@pytest.mark.parametrize("own_engine", LOCAL, indirect=True)
def test_a_restarted_process_is_taken_over_while_requests_run(own_engine: Any, make_engine: Any, plain: Any) -> None:
    """Requests that began with the old process draft with the new one, which has none of their keys yet."""
    requests = [replace_tokens(request, 100) for request in requests_of(count=4, tokens=10)]
    wanted = plain(requests)
    engine, counts = own_engine, []

    def lose(step: int) -> None:
        if step == 5:
            os.kill(pid_of(engine), signal.SIGKILL)
        if step == 10:
            wait_for_restart(engine)
            counts.append((engine.report().drafts, engine.report().accepted_tokens))

    assert run(engine, requests, lose) == wanted
    report = engine.report()
    drafts, accepted = report.drafts - counts[0][0], report.accepted_tokens - counts[0][1]
    assert accepted / drafts > (1.5 if drafter_in(engine).first_slot == 0 else 0), "keys are missing"


@pytest.mark.parametrize("own_engine", ["own-model"], indirect=True)
def test_a_process_that_hangs_is_replaced(own_engine: Any, make_engine: Any, plain: Any) -> None:
    engine, requests = own_engine, requests_of()
    wanted = plain(requests)
    drafter_in(engine)._supervisor._process._reply_seconds = 0.5
    problems = set()

    def stop(step: int) -> None:
        if step == 12:
            os.kill(pid_of(engine), signal.SIGSTOP)
        problems.add(engine.report().draft.problem)

    assert run(engine, requests, stop) == wanted
    assert any("did not answer for 0.5 seconds" in problem for problem in problems if problem)


def replace_tokens(request: Submit, tokens: int) -> Submit:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=tokens))
