"""The loop of one deployment: the order of its writes, what wakes it, and what becomes of errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from specdecode_operator.controller import deployment_loop as module
from specdecode_operator.controller.deployment_loop import DeploymentLoop, next_turn
from specdecode_operator.errors import NotLeader, Unavailable
from specdecode_operator.kube.apply import ChildRecord
from specdecode_operator.state.learned import TRAINING_KEY
from specdecode_operator.types import Outcome, PolicyPeers
from support.background import background
from support.operators.canary import Canary, canary_with, capturing, distilling
from support.operators.fleet import SimulatedWorker, Truth
from support.operators.loop_bench import KEY, POD, Bench, Cluster
from support.waiting import eventually

# --- one step ---------------------------------------------------------------------------------------------------------


async def test_state_is_saved_before_the_plan_and_status_comes_last() -> None:
    bench = Bench()
    await bench.step()
    assert bench.cluster.writes[:2] == ["ConfigMap/demo-state", "ConfigMap/demo-plan"]
    assert bench.cluster.writes[-1] == "status"
    assert "Deployment/demo-worker" in bench.cluster.writes
    assert bench.cluster.status["observedGeneration"] == 1


async def test_what_cannot_be_saved_takes_no_effect_until_it_is() -> None:
    bench, worker = Bench(pods=(POD,)), SimulatedWorker(Truth())
    bench.cluster.down = {"demo-state"}
    await bench.read(worker.report())
    assert await bench.step() <= module.PROBLEM_SECONDS
    assert bench.calls.pushed == []
    assert "Deployment/demo-worker" in bench.cluster.writes, "children do not wait"
    bench.cluster.down = set()
    await bench.step()
    assert "demo-state" in bench.cluster.stored, "the decision of the step before is saved"
    assert [plans.keys() for plans in bench.calls.pushed] == [{POD.address}]


async def test_a_plan_is_pushed_once_after_each_round_of_reports() -> None:
    bench, worker = Bench(pods=(POD,)), SimulatedWorker(Truth())
    await bench.read(worker.report())
    for _ in range(3):
        await bench.step()
    assert len(bench.calls.pushed) == 1
    await bench.read(worker.report().model_copy(update={"clock_seconds": worker.report().clock_seconds + 5}))
    await bench.step()
    assert len(bench.calls.pushed) == 2, "the worker has not taken it"
    (plan,) = bench.calls.pushed[-1].values()
    worker.plan = plan
    worker.run(5)
    await bench.read(worker.report())
    await bench.step()
    assert len(bench.calls.pushed) == 2


async def test_no_plan_is_pushed_without_leadership(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NotLeader("not the leader")

    bench = Bench(pods=(POD,))
    await bench.read(SimulatedWorker(Truth()).report())
    monkeypatch.setattr(bench.cluster, "guard", refuse)
    with pytest.raises(NotLeader):
        await bench.step()
    assert bench.calls.pushed == []


async def test_a_paused_deployment_is_shown_and_not_changed() -> None:
    bench = Bench(Cluster(paused=True), pods=(POD,))
    await bench.read(SimulatedWorker(Truth()).report())
    await bench.step()
    assert bench.cluster.writes == ["status"]
    assert bench.calls.pushed == []


async def test_what_was_decided_during_a_pause_is_saved_at_its_end() -> None:
    bench = Bench()
    await bench.step()
    for spec, saved in (({"paused": True, "workers": {"image": "worker:2"}}, 1), ({"paused": False}, 2), ({}, 2)):
        bench.cluster.edit(**spec)
        await bench.step()
        await bench.step()
        assert bench.cluster.writes.count("ConfigMap/demo-state") == saved
    again = bench.restart()
    await again.step()
    assert again.loop._session.learned.template == bench.loop._session.learned.template


async def test_a_reading_is_counted_once_however_often_a_step_is_made() -> None:
    bench, worker = Bench(pods=(POD,)), SimulatedWorker(Truth())
    for round_ in range(1, 4):
        worker.run(5)
        await bench.read(worker.report())
        await bench.step()
        once = bench.loop._session.learned.traffic
        await bench.step(0.5)
        assert bench.loop._session.learned.traffic == once
        assert len(bench.loop._session.window) == round_ - 1


async def test_a_new_process_goes_on_from_the_stored_state() -> None:
    bench, worker = Bench(pods=(POD,)), SimulatedWorker(Truth())
    for _ in range(4):
        worker.run(5)
        await bench.read(worker.report())
        await bench.step(30)
    again = bench.restart()
    await again.step()
    assert again.loop._session.learned.plan == bench.loop._session.learned.plan
    assert again.loop._session.learned.acceptance


async def test_status_is_written_only_if_it_differs() -> None:
    bench = Bench()
    for _ in range(4):
        await bench.step()
    assert bench.cluster.writes.count("status") == 1
    assert bench.cluster.writes.count("ConfigMap/demo-state") == 1, "nothing was measured"


async def test_a_refused_spec_leaves_children_as_they_are_until_the_next_generation() -> None:
    bench = Bench(Cluster(workers={"template": {"spec": {"containers": [{"image": "x"}]}}}))
    assert await bench.step() == module.VERIFY_SECONDS
    assert bench.cluster.writes == ["status"]
    stalled = bench.cluster.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "SpecRefused")
    assert "needs a name" in stalled["message"]
    bench.cluster.edit(workers={"template": {"spec": {"containers": []}}})
    await bench.step()
    assert "Deployment/demo-worker" in bench.cluster.writes
    assert "SpecRefused" not in {condition["reason"] for condition in bench.cluster.status["conditions"]}


async def test_an_internal_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by zero")

    bench = Bench()
    monkeypatch.setattr(module, "decide", broken)
    await bench.step()
    stalled = bench.cluster.condition("Stalled")
    assert stalled["reason"] == "InternalError"
    assert "ZeroDivisionError: division by zero; please report this" in stalled["message"]


async def test_a_deployment_that_was_deleted_without_an_event_ends_its_loop() -> None:
    bench = Bench()
    await bench.step()
    bench.cluster.is_deleted = True
    await bench.step()
    assert bench.gone == [], "it is looked for once in five minutes"
    with pytest.raises(asyncio.CancelledError):
        await bench.step(module.VERIFY_SECONDS)
    assert bench.gone == [KEY]
    assert not bench.shared.writers.locked()


@pytest.mark.parametrize("owner", ["u1", "another"])
async def test_policy_and_prefetch_are_deleted_once_none_is_wanted(owner: str) -> None:
    cache = {"hostPath": {"path": "/models"}}
    wanting = Cluster(modelCache=cache, prefetchNodeSelector={"models": "llama"})
    names = {"NetworkPolicy": "demo", "DaemonSet": "demo-prefetch"}
    for bench in (Bench(), Bench(wanting)):
        wanted = replace(bench.shared.defaults, policy_peers=PolicyPeers() if bench.cluster is wanting else None)
        bench.loop = DeploymentLoop(KEY, replace(bench.shared, defaults=wanted))
        for kind, name in names.items():
            record = ChildRecord(kind=kind, namespace="ns", name=name, uid="p1", controller_uid=owner)
            bench.records[record.child] = record
        await bench.step()
        made = {f"{kind}/{name}" for kind, name in names.items()}
        deleted = {f"deleted {one} p1" for one in made if owner == "u1" and bench.cluster is not wanting}
        assert {write for write in bench.cluster.writes if write.startswith("deleted")} == deleted
        assert (made <= set(bench.cluster.writes)) == (bench.cluster is wanting)


@pytest.mark.parametrize("spec", [{}, {"tlsSecretRef": {"name": "certs"}}])
async def test_workers_with_a_certificate_are_called_over_https(spec: dict[str, Any]) -> None:
    bench = Bench(Cluster(**spec), period=0.05, pods=(POD,))
    async with background(bench.loop.run()):
        await eventually(lambda: bench.calls.access)
    assert bench.calls.access[0].tls == bool(spec)


# --- the loop ---------------------------------------------------------------------------------------------------------


async def test_a_change_by_a_user_does_not_wait_for_workers() -> None:
    bench = Bench(period=0.05, pods=(POD,))
    bench.calls.answers.clear()
    async with background(bench.loop.run()):
        await eventually(lambda: bench.calls.access)
        before = len(bench.cluster.writes)
        bench.cluster.edit(speculation={"mode": "Advisory"})
        began = time.monotonic()
        bench.loop.wake(changed=True)
        await eventually(lambda: len(bench.cluster.writes) > before)
        assert time.monotonic() - began < module.GAP_SECONDS
        assert bench.cluster.status["observedGeneration"] == 2


async def test_a_round_of_reports_wakes_the_loop() -> None:
    bench, worker = Bench(period=0.1, pods=(POD,)), SimulatedWorker(Truth())
    worker.run(5)
    bench.calls.report = worker.report()
    async with background(bench.loop.run()):
        await eventually(lambda: bench.calls.pushed)
    assert bench.loop._session.baselines.keys() == {"p"}


def counted_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each step from now on adds its time, instead of deciding."""
    steps: list[float] = []

    async def step() -> float:
        steps.append(time.monotonic())
        return 100.0

    monkeypatch.setattr(bench.loop, "_step", step)
    return steps


@pytest.mark.parametrize(("tag", "share"), [("same", 1 / module.REST_ROUNDS), ("", 1)], ids=["at rest", "news"])
async def test_a_deployment_at_rest_is_looked_at_seldom(
    tag: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(period=0.01, pods=(POD,))
    bench.calls.report, bench.calls.tag = SimulatedWorker(Truth()).report(), tag
    steps = counted_steps(bench, monkeypatch)
    monkeypatch.setattr(module, "GAP_SECONDS", 0.0)
    async with background(bench.loop.run()):
        await eventually(lambda: bench.loop._poller.round >= 60)
    assert abs(len(steps) - share * bench.loop._poller.round) <= 0.2 * bench.loop._poller.round


async def test_events_without_end_leave_a_gap_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    steps = counted_steps(bench, monkeypatch)
    async with background(bench.loop.run()):
        ends = time.monotonic() + 1
        while time.monotonic() < ends:
            bench.loop.wake()
            await asyncio.sleep(0.01)
    assert 2 <= len(steps) <= 6


async def test_a_step_that_fails_is_repeated_with_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "GAP_SECONDS", 0.0)
    bench = Bench()
    bench.cluster.error = Unavailable("put status: no answer")
    async with background(bench.loop.run()):
        await eventually(lambda: caplog.text.count("Unavailable") >= 4)
        bench.cluster.error = None
        await eventually(lambda: "status" in bench.cluster.writes)
    assert "again within 0 s" in caplog.text
    assert not bench.shared.writers.locked()


async def test_a_round_of_reports_ends_a_long_pause_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "back_off", lambda *_, **__: module.LAST_RETRY_SECONDS)
    bench = Bench(period=0.1)
    bench.cluster.error = Unavailable("put status: no answer")
    async with background(bench.loop.run()):
        await eventually(lambda: bench.cluster.writes)
        bench.cluster.error = None
        await eventually(lambda: "status" in bench.cluster.writes)


async def test_steps_of_other_deployments_wait_for_a_place_only_while_one_talks_to_the_api_server() -> None:
    bench, worker = Bench(pods=(POD,)), SimulatedWorker(Truth())
    await bench.read(worker.report())
    pushing = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> None:
        pushing.set()
        await asyncio.Event().wait()

    bench.calls.push = hang  # type: ignore[method-assign]
    step = asyncio.create_task(bench.step())
    await pushing.wait()
    assert not bench.shared.writers.locked(), "a worker that takes no plan delays its own deployment alone"
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)


async def test_the_queue_depth_counts_deployments_that_wait_for_a_place() -> None:
    bench = Bench()
    await bench.shared.writers.acquire()
    step = asyncio.create_task(bench.step())
    await asyncio.sleep(0.01)
    assert REGISTRY.get_sample_value("specdecode_operator_queue_depth") == 1
    bench.shared.writers.release()
    await step
    assert REGISTRY.get_sample_value("specdecode_operator_queue_depth") == 0


def test_deployments_have_places_within_the_period() -> None:
    turns = [next_turn(("ns", f"d{number}"), 5.0, 1000.0) for number in range(1000)]
    assert all(1000 <= turn < 1005 for turn in turns)
    by_second = [sum(int(turn - 1000) == second for turn in turns) for second in range(5)]
    assert min(by_second) > 150
    assert next_turn(KEY, 5.0, next_turn(KEY, 5.0, 1000.0) + 0.001) == pytest.approx(next_turn(KEY, 5.0, 1000.0) + 5)


# --- the rollout of drafts, which is stored before anything that follows from it --------------------------------------


async def carried_out(canary: Canary, *, down: bool = False) -> tuple[Outcome, Bench]:
    """Carry out the last decision. With ``down`` the state cannot be stored."""
    bench = Bench()
    bench.cluster.down = {"demo-state", "draft-0"} if down else set()
    observed = replace(canary.observed(), session=canary.session)
    bench.drafts = observed.drafts
    return await bench.loop._apply(canary.deployment, observed, canary.decision, canary.now), bench


def stored_training(bench: Bench) -> Any:
    return bench.cluster.stored.get("demo-state", {"data": {}})["data"].get(TRAINING_KEY)


async def test_the_rollout_is_written_before_the_plan() -> None:
    canary = canary_with()
    canary.tick(push=False)
    outcome, bench = await carried_out(canary)
    draft = "SpecDecodeDraft/draft-0"
    assert bench.cluster.writes[:4] == [draft, f"{draft}/status", "ConfigMap/demo-state", "ConfigMap/demo-plan"]
    assert not outcome.problems


async def test_the_job_is_created_after_the_run_is_stored() -> None:
    canary = distilling()
    outcome, bench = await carried_out(canary)
    assert bench.cluster.writes[0] == "ConfigMap/demo-state"
    assert canary.record.run.id in stored_training(bench)
    assert bench.cluster.writes[-1] == f"Job/demo-distill-{canary.record.run.id}"
    assert outcome.job_problem == ""


@pytest.mark.parametrize("begun", [canary_with, distilling], ids=["rollout", "run"])
async def test_what_cannot_be_stored_does_not_begin(begun: Callable[[], Canary]) -> None:
    canary = begun()
    canary.tick(push=False)
    outcome, bench = await carried_out(canary, down=True)
    assert "ConfigMap/demo-plan" not in bench.cluster.writes
    assert not any(write.startswith("Job/") for write in bench.cluster.writes)
    assert "Deployment/demo-worker" in bench.cluster.writes, "the other children do not wait"
    assert outcome.problems
    assert bench.loop._is_unsaved


async def test_a_refused_command_is_stored_so_that_it_is_not_carried_out_after_a_restart() -> None:
    quiet = capturing(distillation={"storage": None})
    commanded = capturing(distillation={"storage": None})
    commanded.carry_out("distill")
    for canary, is_stored in ((quiet, False), (commanded, True)):
        _, bench = await carried_out(canary)
        assert (stored_training(bench) is not None) == is_stored
