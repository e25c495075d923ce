"""Events of children: those that wake the loop of their deployment, and the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.controller import process as module
from specdecode_operator.controller.admin_tokens import TokenKeys
from specdecode_operator.controller.process import Fleet, Process
from specdecode_operator.settings import Settings

KEY = ("ns", "a")


class Bench:
    """A fleet whose only loop counts how often it is woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)
        unused: Any = SimpleNamespace(guard=None, timeout_seconds=1.0, record=lambda child: None, note_draft=None)
        self.process = Process(Settings())
        self.process.client = self.process.workers = self.process.caches = unused
        self.fleet = self.process.fleet = Fleet(Settings(), self.process, TokenKeys(b"k"))
        self.woken: list[bool] = []
        self.cancelled = 0
        self.settled = True
        self.checks = 0
        loop: Any = SimpleNamespace(wake=lambda *, changed: self.woken.append(changed))
        task: Any = SimpleNamespace(cancel=self.cancel)
        self.fleet._loops[KEY] = loop, task
        monkeypatch.setattr(self.fleet._applier, "is_settled", self.is_settled)

    def cancel(self) -> None:
        self.cancelled += 1

    def is_settled(self, key: object, names: object) -> bool:
        self.checks += 1
        return self.settled


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_a_changed_pod_wakes_the_loop(bench: Bench) -> None:
    bench.process._workers_changed(KEY)
    bench.process._workers_changed(("ns", "unknown"))
    assert bench.woken == [False]


async def test_the_echo_of_a_write_wakes_nothing(bench: Bench) -> None:
    for _ in range(3):
        bench.process._child_changed(KEY)
    await asyncio.sleep(0.05)
    assert bench.woken == []
    assert bench.checks == 1, "events that come together are checked once"


async def test_a_child_that_others_changed_wakes_the_loop(bench: Bench) -> None:
    bench.settled = False
    bench.process._child_changed(KEY)
    assert bench.woken == [], "the answer to a write may still be on its way"
    await asyncio.sleep(0.05)
    assert bench.woken == [False]
    bench.process._child_changed(KEY)
    await asyncio.sleep(0.05)
    assert bench.checks == 2


async def test_a_child_of_a_deleted_deployment_is_left_to_the_garbage_collector(bench: Bench) -> None:
    bench.settled = False
    bench.process._child_changed(KEY)
    bench.fleet.forget(KEY, "u1")
    await asyncio.sleep(0.05)
    assert bench.woken == []
    assert bench.cancelled == 1


async def test_refusals_of_a_deleted_deployment_are_forgotten(bench: Bench) -> None:
    jobs = bench.fleet._shared.jobs
    jobs._refused[KEY] = SimpleNamespace()  # type: ignore[assignment]
    bench.fleet.forget(KEY, "u1")
    assert jobs._refused == {}
