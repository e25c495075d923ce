"""Order of the writes of a step: the rollout of drafts is stored before anything that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdecode_operator.state.learned import TRAINING_KEY
from specdecode_operator.types import Outcome
from support.operators.canary import Canary, canary_with, capturing, distilling
from support.operators.fleet import workload_with
from support.operators.loop_bench import Bench


async def carried_out(canary: Canary, *, down: bool = False) -> tuple[Outcome, Bench]:
    """Carry out the last decision. With ``down`` the state cannot be stored."""
    bench = Bench()
    bench.cluster.down = {"demo-state", "draft-0"} if down else set()
    observed = replace(canary.observed(), session=canary.session, workload=workload_with(2))
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


async def test_a_rollout_that_cannot_be_stored_does_not_begin() -> None:
    canary = canary_with()
    canary.tick(push=False)
    outcome, bench = await carried_out(canary, down=True)
    assert "ConfigMap/demo-plan" not in bench.cluster.writes
    assert "Deployment/demo-worker" in bench.cluster.writes, "the other children do not wait"
    assert outcome.problems
    assert bench.loop._is_unsaved


async def test_the_job_is_created_after_the_run_is_stored() -> None:
    canary = distilling()
    outcome, bench = await carried_out(canary)
    assert bench.cluster.writes[0] == "ConfigMap/demo-state"
    assert canary.record.run.id in stored_training(bench)
    assert bench.cluster.writes[-1] == f"Job/demo-distill-{canary.record.run.id}"
    assert outcome.job_problem == ""


async def test_no_job_is_created_for_a_run_that_cannot_be_stored() -> None:
    outcome, bench = await carried_out(distilling(), down=True)
    assert outcome.problems
    assert bench.loop._is_unsaved
    assert not any(write.startswith("Job/") for write in bench.cluster.writes)


async def test_a_refused_command_is_stored_so_that_it_is_not_carried_out_after_a_restart() -> None:
    quiet = capturing(distillation={"storage": None})
    commanded = capturing(distillation={"storage": None})
    commanded.command("distill")
    commanded.tick()
    for canary, is_stored in ((quiet, False), (commanded, True)):
        _, bench = await carried_out(canary)
        assert (stored_training(bench) is not None) == is_stored
