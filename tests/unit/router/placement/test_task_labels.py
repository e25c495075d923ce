"""Task of a request, by header, metadata and text, as the worker's plan store reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_router.placement.task_labels import task_of
from specdecode_worker.contract import OTHER_TASK, Plan, TaskMatch
from specdecode_worker.contract.internal_stream import PlanTask
from specdecode_worker.server.service import PlanStore

TASKS = (PlanTask("code", "def "), PlanTask("chat"), PlanTask("table", "id,name"))
CASES: tuple[tuple[str | None, dict[str, Any]], ...] = (
    ("chat", {"prompt": "def f"}),
    ("unknown", {"prompt": "def f"}),
    (None, {"prompt": "def f", "metadata": {"task": "chat"}}),
    (None, {"prompt": "def f", "metadata": {"task": "unknown"}}),
    (None, {"prompt": "id,name and def f"}),
    (None, {"prompt": "id,name"}),
    (None, {"prompt": ["a", "def f"]}),
    (None, {"prompt": "nothing"}),
    (None, {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": "def f"}]}),
    (None, {"messages": [{"role": "user", "content": [{"type": "text", "text": "id,name"}]}]}),
)


@pytest.mark.parametrize(("header", "body"), CASES)
def test_the_label_is_that_of_the_worker(header: str | None, body: dict[str, Any]) -> None:
    store = PlanStore("", Plan(tasks=tuple(TaskMatch(name=task.name, match=task.match) for task in TASKS)))
    metadata = body.get("metadata", {}).get("task")
    expected = store.task(header, metadata, json.dumps(body.get("prompt", body.get("messages"))))
    task = task_of(TASKS, header, body)
    assert (task.name if task else OTHER_TASK) == expected


OF_CLIENTS = (
    PlanTask("acme-code", "def ", clients=("acme",)),
    PlanTask("acme", clients=("acme", "acme-eu")),
    PlanTask("code", "def "),
)


@pytest.mark.parametrize(
    ("client", "prompt", "expected"),
    [
        ("acme", "def f", "acme-code"),
        ("acme", "hello", "acme"),
        ("acme-eu", "def f", "acme"),
        ("globex", "def f", "code"),
        ("globex", "hello", OTHER_TASK),
        ("", "hello", OTHER_TASK),
    ],
)
def test_a_task_may_be_that_of_customers(client: str, prompt: str, expected: str) -> None:
    rules = tuple(TaskMatch(name=task.name, match=task.match, clients=task.clients) for task in OF_CLIENTS)
    store = PlanStore("", Plan(tasks=rules))
    assert store.task(None, None, prompt, client) == expected
    assert store.task("code", None, prompt, client) == "code", "the header says otherwise"
    task = task_of(OF_CLIENTS, None, {"prompt": prompt}, client)
    assert (task.name if task else OTHER_TASK) == expected


@pytest.mark.parametrize("body", [{"messages": 3}, {"messages": ["x", {"content": 4}]}, {"prompt": [1, [2]]},
                                  {"metadata": "x"}, {"metadata": {"task": ["code"]}}])  # fmt: skip
def test_bodies_of_another_form_have_no_task(body: dict[str, Any]) -> None:
    assert task_of(TASKS, None, body) is None
