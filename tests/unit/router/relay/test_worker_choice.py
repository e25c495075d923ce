"""Choice of the worker of a request: its task by the plan, the homes of drafts, and the deployment."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from specdecode_router.placement.placement_state import PlacementState
from specdecode_router.placement.traffic_split import TrafficSplit
from specdecode_router.relay.worker_choice import WorkerChoice
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.worker import Endpoint, WorkerView
from specdecode_worker.contract.internal_stream import End, PlanTask

CHAT = "/v1/chat/completions"
TASKS = (PlanTask("code", "def ", "coder"), PlanTask("chat"))
WORKERS = [WorkerView(Endpoint(f"w{number}", ""), 0, plan_tasks=TASKS) for number in range(4)]


def choice_of(state: PlacementState, text: str, task: str | None = None, **fields: Any) -> WorkerChoice:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return WorkerChoice(state, RouterMetrics(), CHAT, body, tenant="t", task=task)


def place(state: PlacementState, text: str, task: str | None = None, *, ends: bool = False) -> str:
    """Choose a worker for a request, which may also end. Return the name of the worker."""
    choice = choice_of(state, text, task)
    worker = choice.choose(WORKERS, "", frozenset())
    if ends:
        choice.record_end(worker.endpoint.name, End(body=b"", prompt_tokens=20, completion_tokens=5))
    return worker.endpoint.name


def test_requests_of_a_draft_meet_at_its_homes_by_text_and_by_header() -> None:
    state = PlacementState()
    for number in range(100):
        place(state, f"{number} def f" if number % 4 == 0 else f"{number} hello", ends=True)
    code = {place(state, f"{number} def g") for number in range(20)}
    named = {place(state, f"{number} please", "code") for number in range(20)}
    others = {place(state, f"{number} hello") for number in range(20)}
    assert len(code) == 1
    assert named == code
    assert not code & others
    assert len(others) == 3


def test_turns_of_a_conversation_meet() -> None:
    state = PlacementState()
    first = place(state, "the beginning")
    assert {place(state, "the beginning", ends=True) for _ in range(10)} == {first}


@pytest.mark.parametrize(("percent", "deployment"), [(0, "old"), (100, "new")])
def test_the_deployment_of_the_last_attempt_is_known(percent: int, deployment: str) -> None:
    workers = [WorkerView(Endpoint(name, "", deployment=name), 0) for name in ("old", "new")]
    choice = choice_of(PlacementState(split=TrafficSplit("old", {"new": percent})), "hello")
    assert choice.deployment == ""
    assert choice.choose(workers, "", frozenset()) is not None
    assert choice.deployment == deployment


def test_without_a_worker_nothing_is_chosen_or_recorded() -> None:
    choice = choice_of(PlacementState(), "hello")
    assert choice.choose([], "", frozenset()) is None
    assert choice.deployment == ""


class Body(dict[str, Any]):
    """Body that can be watched."""


def test_the_parsed_body_is_kept_until_the_first_choice_only() -> None:
    body = Body(prompt=[1, 2, 3])
    watched = weakref.ref(body)
    choice = WorkerChoice(PlacementState(), RouterMetrics(), "/v1/completions", body, tenant="t", task=None)
    del body
    first = choice.choose(WORKERS, "", frozenset())
    assert watched() is None
    assert choice.choose(WORKERS, "", frozenset()) == first
