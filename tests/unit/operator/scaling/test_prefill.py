"""Tests of prefill workers in the operator: pods, addresses in the plan, and their number."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests, scaling
from specdecode_operator.api.v1alpha1 import PrefillSpec
from specdecode_operator.controller.status import prefill_section
from specdecode_operator.scaling import prefill_replicas
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.telemetry.counters import NO_TRAFFIC, Delta
from specdecode_operator.types import Decision, Observation, Worker
from specdecode_worker.contract import Env, PlanState, Port, Report, WorkerConfig
from support.operators.fleet import decided, deployment_with, with_spec, workload_with


def prefill_pod(name: str, address: str | None, **fields: Any) -> Worker:
    return Worker(name=name, uid=name, address=address, role="prefill", **{"ready": True, **fields})


def fresh() -> Session:
    return Session(learned=LearnedState(uid="u1"), stored=False)


def child(decision: Decision, name: str) -> Any:
    own = (one for one in decision.children if one["kind"] == "Deployment" and one["metadata"]["name"] == name)
    return next(own, None)


def config_of(workload: Any) -> WorkerConfig:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    value = next(one["value"] for one in container["env"] if one["name"] == Env.config)
    return WorkerConfig.model_validate(json.loads(value))


def test_prefill_workers_have_the_pods_of_workers_in_a_role_of_their_own() -> None:
    deployment = deployment_with(prefill={"replicas": 2})
    decision, _ = decided(deployment, fresh(), workload=None)
    workers, prefill = (child(decision, f"{deployment.name}-{role}") for role in ("worker", "prefill"))
    assert prefill["spec"]["replicas"] == 2
    assert config_of(prefill).engine == config_of(workers).engine.model_copy(update={"role": "prefill"})
    assert config_of(workers).engine.block_port == Port.blocks
    labels = prefill["spec"]["template"]["metadata"]["labels"]
    assert prefill["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["specdecode.io/role"] == prefill["metadata"]["labels"]["specdecode.io/role"] == "prefill"
    for kind in ("Service", "PodDisruptionBudget"):
        for one in decision.children:
            if one["kind"] == kind:
                selector = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
                assert not selector.items() <= labels.items(), "prefill workers are in no Service and no budget"
    assert workers["spec"]["template"]["metadata"]["labels"]["specdecode.io/role"] == "worker"


def test_prefill_workers_of_an_older_template_listen_too() -> None:
    config = {"model": {"uri": "a", "served_name": "a"}, "engine": {"max_num_seqs": 3}}
    container = {"name": "worker", "env": [{"name": Env.config, "value": json.dumps(config)}]}
    old = {"metadata": {"labels": {}}, "spec": {"containers": [container]}}
    made = manifests.prefill_workload(deployment_with(), old, "h", 1)
    engine = config_of(made).engine
    assert (engine.role, engine.block_port, engine.max_num_seqs) == ("prefill", Port.blocks, 3)
    assert json.loads(container["env"][0]["value"]) == config, "the workers' template stays as it is"  # type: ignore[arg-type, index]


def test_without_prefill_there_is_no_child_and_afterwards_it_has_no_pods() -> None:
    deployment = deployment_with()
    name = f"{deployment.name}-prefill"
    decision, _ = decided(deployment, fresh(), workload=None)
    assert child(decision, name) is None
    decision, _ = decided(deployment, fresh(), workload=None, prefill_workload=workload_with(2))
    assert child(decision, name)["spec"]["replicas"] == 0


def test_addresses_of_ready_prefill_workers_are_published_and_pushed_to_both_roles() -> None:
    pods = (
        prefill_pod("b", "10.0.0.2"),
        prefill_pod("a", "fd00::1"),
        prefill_pod("new", "10.0.0.3", ready=False),
        prefill_pod("old", "10.0.0.4", leaving=True),
        prefill_pod("unplaced", None),
    )
    deployment = deployment_with(prefill={"replicas": 2})
    first, session = decided(deployment, fresh(), workload=None)
    assert first.plan.prefill == ()
    report = Report(boot_id="b", worker="w", clock_seconds=1, plan=PlanState(uid="u1", version=first.plan.version))
    worker = Worker(name="w", uid="w", address="10.0.0.9", ready=True, report=report)
    reporting = replace(pods[0], report=report)
    seen: dict[str, Any] = {"workload": None, "workers": (worker,), "prefill": (reporting, *pods[1:])}
    second, session = decided(deployment, session, **seen)
    assert second.plan.prefill == ("10.0.0.2:8002", "[fd00::1]:8002")
    assert second.plan.version == first.plan.version + 1, "workers are told without a restart"
    assert set(second.pushes) == {"10.0.0.9", "10.0.0.2"}
    third, _ = decided(deployment, session, **seen)
    assert third.plan == second.plan


def test_a_plan_names_no_more_prefill_workers_than_a_worker_reads() -> None:
    """A rolling update adds a pod to the 256 replicas that the spec allows."""
    pods = tuple(prefill_pod(f"p{index}", f"10.0.{index // 256}.{index % 256}") for index in range(257))
    decision, _ = decided(deployment_with(prefill={"replicas": 256}), fresh(), workload=None, prefill=pods)
    assert len(decision.plan.prefill) == 256


def wanted_by(
    rate: float, running: int, spec: PrefillSpec, *, is_known: bool = True, away: int = 0, **fields: Any
) -> int:
    """Return how many prefill workers are wanted for two workers, of which ``away`` are not available."""
    delta = Delta(seconds=60.0, at=1000.0, traffic={"other": NO_TRAFFIC._replace(arrivals=rate * 60)})
    mix = scaling.Mix(prompt_tokens=0, output_tokens=10, context_tokens=10, prompt_busy_seconds=0.5)
    worker = scaling.WorkerModel(mix=mix, step_model=None, limits=None)  # type: ignore[arg-type]
    workload, prefill = workload_with(2, available=2 - away), workload_with(running)
    observed = Observation(workload=workload, workers=(), session=fresh(), prefill_workload=prefill)
    deployment = with_spec(deployment_with(**fields), prefill=spec)
    return prefill_replicas(deployment, observed, worker if is_known else None, (delta,), 1000.0)


BOUNDS = PrefillSpec(replicas=1, max_replicas=4)


@pytest.mark.parametrize(
    ("rate", "running", "wanted"),
    [
        (0.0, 1, 1),
        (1.0, 1, 1),  # half a worker is busy
        (1.5, 1, 2),
        (4.0, 2, 3),  # two busy ones need three
        (3.9, 4, 4),  # three would be busy for two thirds of the time
        (2.9, 4, 3),
        (50.0, 4, 4),
    ],
)
def test_prefill_workers_follow_the_prompts_that_no_cache_has(rate: float, running: int, wanted: int) -> None:
    assert wanted_by(rate, running, BOUNDS) == wanted


def test_no_prefill_worker_is_taken_away_while_workers_do_not_report() -> None:
    assert (wanted_by(0.0, 4, BOUNDS), wanted_by(0.0, 4, BOUNDS, away=1)) == (1, 4)
    assert wanted_by(4.0, 2, BOUNDS, away=1) == 3, "what the others need is added"


def test_prefill_workers_stay_while_nothing_is_known_or_the_deployment_is_paused() -> None:
    assert wanted_by(0.0, 3, BOUNDS, is_known=False) == 3
    assert wanted_by(9.0, 2, BOUNDS, paused=True) == 2
    assert wanted_by(9.0, 2, PrefillSpec(replicas=3)) == 3


def test_status_counts_prefill_workers() -> None:
    deployment = deployment_with(prefill={"replicas": 3})
    observed = Observation(workload=None, workers=(), session=fresh(), prefill_workload=workload_with(3, ready=2))
    section = prefill_section(deployment, observed)
    assert (section.ready_replicas, section.ready) == (2, "2/3")
    assert prefill_section(deployment_with(), observed) is None
