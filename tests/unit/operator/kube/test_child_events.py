"""Events of children: those that start a decision, those that start a reconcile, and the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.controller import loops as module
from specdecode_operator.controller.admin_tokens import TokenKeys
from specdecode_operator.controller.loops import Loops
from specdecode_operator.controller.process import Process
from specdecode_operator.settings import Settings
from specdecode_operator.state.deployment_state import DeploymentState, StateTable
from specdecode_operator.state.packed import Packed

KEY = ("ns", "a")


class Bench:
    """Loops that do not run, so that their queues show what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)
        monkeypatch.setattr(module, "CACHE_LAG_SECONDS", 0.01)
        unused: Any = SimpleNamespace(guard=None, timeout_seconds=1.0, record=lambda child: None)
        self.table = StateTable()
        self.table.put(KEY, DeploymentState(resource=Packed.of({}), generation=1))
        self.loops = Loops(Settings(), unused, unused, unused, self.table, TokenKeys(b"k"))
        self.settled = True
        self.checks = 0
        monkeypatch.setattr(self.loops._applier, "is_settled", self.is_settled)

    def is_settled(self, key: object, names: object) -> bool:
        self.checks += 1
        return self.settled

    @property
    def queued(self) -> tuple[int, int]:
        return self.loops.planning.depth(), self.loops.reconciling.depth()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_a_changed_pod_starts_a_decision(bench: Bench) -> None:
    bench.loops.workers_changed(KEY)
    assert bench.queued == (1, 0)


async def test_the_echo_of_a_write_starts_nothing(bench: Bench) -> None:
    for _ in range(3):
        bench.loops.child_changed(KEY)
    await asyncio.sleep(0.05)
    assert bench.queued == (0, 0)
    assert bench.checks == 1, "events that come together are checked once"


async def test_a_child_that_others_changed_is_reconciled_without_a_decision(bench: Bench) -> None:
    bench.settled = False
    bench.loops.child_changed(KEY)
    assert bench.queued == (0, 0), "the answer to a write may still be on its way"
    await asyncio.sleep(0.05)
    assert bench.queued == (0, 1)
    bench.loops.child_changed(KEY)
    await asyncio.sleep(0.05)
    assert bench.checks == 2


async def test_a_child_of_a_deleted_deployment_is_left_to_the_garbage_collector(bench: Bench) -> None:
    bench.settled = False
    bench.loops.child_changed(KEY)
    bench.table.remove(KEY)
    await asyncio.sleep(0.05)
    assert bench.queued == (0, 0)


async def test_each_cache_reports_to_its_own_queue(bench: Bench) -> None:
    process = Process(Settings())
    process._table, process._loops = bench.table, bench.loops
    process._workers_changed(KEY)
    assert bench.queued == (1, 0)
    bench.settled = False
    process._child_changed(KEY)
    await asyncio.sleep(0.05)
    assert bench.queued == (1, 1)


@pytest.mark.parametrize("spec", [{}, {"tlsSecretRef": {"name": "certs"}}])
def test_workers_with_a_certificate_are_called_over_https(bench: Bench, spec: dict[str, Any]) -> None:
    resource = {"metadata": {"namespace": KEY[0], "name": KEY[1]}, "spec": spec}
    state = DeploymentState(resource=Packed.of(resource), generation=1)
    assert bench.loops._access(state).tls == bool(spec)


async def test_an_apply_without_an_event_is_checked(bench: Bench) -> None:
    bench.settled = False
    bench.loops._check_later(KEY)
    await asyncio.sleep(0.05)
    assert bench.queued == (0, 1)
