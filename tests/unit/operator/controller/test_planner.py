"""The planner loop: what it hands to the reconciler, and what becomes of a spec that cannot be carried out."""

from __future__ import annotations

from typing import Any, cast

import pytest

from specdecode_operator.controller import planner as planner_module
from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.planner import Planner
from specdecode_operator.controller.resource import identity_of
from specdecode_operator.state.deployment_state import (
    DeploymentState,
    Failure,
    Readings,
    StateTable,
    WorkerReading,
)
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.session import PackedSession, Session
from specdecode_operator.types import Key, Worker
from support.operators.fleet import DEFAULTS, SPEC, SimulatedWorker, Truth

KEY = ("ns", "n")


class OneWorker:
    """Caches of a deployment with one ready worker."""

    def workers(self, key: Key) -> tuple[Worker, ...]:
        return (Worker(name="p", uid="p", address="10.0.0.1", ready=True),)

    def workload(self, key: Key) -> None:
        return None

    def routers(self, key: Key) -> None:
        return None

    def demand(self, key: Key) -> dict[str, Any]:
        return {}

    def jobs(self, key: Key) -> tuple[()]:
        return ()

    def jobs_problem(self, key: Key) -> str:
        return ""


def resource(generation: int = 1, **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": "n", "uid": "u1", "generation": generation}
    return {"metadata": metadata, "spec": {**SPEC, **spec}}


class Setup:
    """A table with one deployment, and a planner on it."""

    def __init__(self, **spec: Any) -> None:
        self.table, self.asked = StateTable(), list[tuple[Key, bool]]()
        self.now = 1000.0
        self.table.put(KEY, DeploymentState(resource=Packed.of(resource(**spec)), generation=1))
        self.planner = Planner(
            self.table,
            cast("Caches", OneWorker()),
            DEFAULTS,
            decided=lambda key, changed: self.asked.append((key, changed)),
            clock=lambda: self.now,
        )

    @property
    def state(self) -> DeploymentState:
        state = self.table.get(KEY)
        assert state is not None
        return state

    def load(self) -> None:
        session = PackedSession.of(Session(learned=LearnedState(uid="u1"), stored=False))
        self.table.update(KEY, session=session)


async def test_nothing_is_decided_before_the_state_was_loaded() -> None:
    setup = Setup()
    await setup.planner.handle(KEY)
    assert setup.state.decision is None
    assert setup.asked == [(KEY, False)]


async def test_a_decision_stays_pending_until_the_reconciler_persists_it() -> None:
    setup = Setup()
    setup.load()
    await setup.planner.handle(KEY)
    assert setup.asked == [(KEY, True)], "a new spec goes first"
    assert setup.state.decision is not None
    assert setup.state.decided == identity_of(setup.state.resource.value["metadata"])
    assert setup.state.pending.urgent, "the first plan must be persisted before it takes effect"
    await setup.planner.handle(KEY)
    assert not setup.state.decision.value.urgent
    assert setup.state.pending.urgent, "the reconciler has not persisted it yet"
    assert setup.asked[-1] == (KEY, False)
    await setup.planner.handle(("ns", "gone"))


async def test_a_reading_is_counted_once_however_often_the_planner_runs() -> None:
    setup, worker = Setup(), SimulatedWorker(Truth())
    setup.load()
    for round_ in range(1, 4):
        worker.run(5)
        setup.now += 5
        reading = WorkerReading.of(worker.report(), str(round_), setup.now)
        setup.table.update(KEY, readings=Readings(at=setup.now, round=round_, by_uid={"p": reading}))
        await setup.planner.handle(KEY)
        assert setup.state.session is not None
        once = setup.state.session.session.learned.traffic
        await setup.planner.handle(KEY)
        assert setup.state.session.session.learned.traffic == once
        assert len(setup.state.session.session.window) == round_ - 1


async def test_a_refused_spec_is_a_failure_until_the_next_generation() -> None:
    setup = Setup(workers={"template": {"spec": {"containers": [{"image": "x"}]}}})
    setup.load()
    await setup.planner.handle(KEY)
    failure = setup.state.failure
    assert failure is not None
    assert (failure.generation, failure.reason) == (1, "SpecRefused")
    assert "needs a name" in failure.message
    setup.table.update(KEY, resource=Packed.of(resource(generation=2)), generation=2)
    await setup.planner.handle(KEY)
    assert setup.state.failure is None
    assert setup.state.decision is not None


async def test_an_internal_error_is_reported_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by zero")

    setup = Setup()
    setup.load()
    monkeypatch.setattr(planner_module, "decide", broken)
    await setup.planner.handle(KEY)
    assert setup.state.failure == Failure(1, "InternalError", "ZeroDivisionError: division by zero; please report this")
    assert setup.asked == [(KEY, True)]
