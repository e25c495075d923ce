"""A draft in a process of its own proposes what a shared draft does, and its loss changes no text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Submit
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts
from support.waiting import until

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


def wait_for_restart(engine: Any) -> None:
    """Wait until a restarted process is ready; the engine takes it over in its next step."""
    until(lambda: drafter_in(engine)._supervisor._restarted, 120)


@pytest.mark.parametrize("own_engine", LOCAL, indirect=True)
@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
def test_a_killed_process_fails_no_request_and_comes_back(own_engine: Any, plain: Any, pipelined: bool) -> None:
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
def test_a_restarted_process_is_taken_over_while_requests_run(own_engine: Any, plain: Any) -> None:
    """Requests that began with the old process draft with the new one, which has none of their keys yet."""
    requests = requests_of(count=4, tokens=100)
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
def test_a_process_that_hangs_is_replaced(own_engine: Any, plain: Any) -> None:
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
