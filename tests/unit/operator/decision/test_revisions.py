"""Revision of an unpinned model: resolved by the first pod, used by all later ones, reset by another URI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import ModelStatus, Status
from specdecode_operator.controller.children import worker_of
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide, settle_revisions
from specdecode_operator.manifests import pod_template
from specdecode_operator.state.learned import Session, parse_state, render_state
from specdecode_operator.types import Decision, Deployment, Outcome, Worker
from specdecode_worker.contract import Env, Revisions
from support.operators.fleet import DEFAULTS, deployment_with, observation_with

URI, DRAFT = "hf://org/model", "hf://org/draft"
FIRST, SECOND = "a" * 40, "b" * 40


def pod(name: str, created_at: float = 0.0, **revisions: str) -> Worker:
    by_uri = {{"model": URI, "draft": DRAFT}.get(key, key): commit for key, commit in revisions.items()}
    return Worker(name=name, uid=name, address=None, ready=False, created_at=created_at, revisions=by_uri)


def deployment(uri: str = URI, draft: str = DRAFT, status: Status | None = None, **spec: Any) -> Deployment:
    return deployment_with(status, model={"uri": uri}, speculation={"draft": {"uri": draft}}, **spec)


def test_the_oldest_pod_decides_and_what_is_known_stays() -> None:
    workers = (pod("a", 2.0, model=SECOND), pod("b", 1.0, model=FIRST, draft=SECOND))
    assert settle_revisions(deployment(), {}, workers) == {URI: FIRST, DRAFT: SECOND}
    known = {URI: SECOND}
    assert settle_revisions(deployment(), known, workers) == {URI: SECOND, DRAFT: SECOND}
    assert settle_revisions(deployment(), known, ()) == known


def test_another_uri_is_resolved_again_and_a_pinned_one_never() -> None:
    known, workers = {URI: FIRST, DRAFT: FIRST}, (pod("a", model=FIRST, draft=FIRST),)
    assert settle_revisions(deployment("hf://org/other"), known, workers) == {DRAFT: FIRST}
    pinned = deployment(f"{URI}@{SECOND}", "embedded://d")
    assert settle_revisions(pinned, known, workers) == {}
    assert settle_revisions(deployment(f"{URI}@main"), {}, (pod("a", **{f"{URI}@main": FIRST}),)) == {
        f"{URI}@main": FIRST
    }


@pytest.mark.parametrize(
    ("uri", "revision", "expected"),
    [(URI, FIRST, {URI: FIRST}), (URI, "main", {}), (URI, None, {}), ("hf://org/old", FIRST, {})],
)
def test_a_lost_state_takes_the_commit_of_the_status(
    uri: str, revision: str | None, expected: Mapping[str, str]
) -> None:
    status = Status(model=ModelStatus(uri=uri, revision=revision))
    assert settle_revisions(deployment(status=status), {}, ()) == expected


def mounted(decision: Decision) -> Mapping[str, str]:
    """Return the commits that a new pod finds."""
    text = decision.children[0]["data"].get("revisions.json", "{}")
    return Revisions.model_validate_json(text).revisions


def template(decision: Decision) -> Any:
    return next(child["spec"]["template"] for child in decision.children if child["kind"] == "Deployment")


def test_a_resolved_commit_is_shown_persisted_and_mounted_without_a_rollout() -> None:
    session, status = Session(), Status()

    def tick(*workers: Worker) -> tuple[Decision, str | None]:
        """Decide with the state of the decision before. Return the decision and the revision in the status."""
        nonlocal session, status
        before, observed = deployment(status=status), observation_with(session, workers=workers)
        decision, session = decide(before, observed, DEFAULTS, now=1000)
        status = status_of(before, observed, decision, Outcome(), now=1000)
        return decision, status.model.revision

    first, revision = tick()
    assert (revision, mounted(first)) == (None, {})
    second, revision = tick(pod("a", model=FIRST))
    assert (revision, mounted(second)) == (FIRST, {URI: FIRST})
    assert template(second) == template(first), "running pods stay"
    assert second.urgent, "a restart of the operator must not lose it"
    assert not tick(pod("a", model=FIRST))[0].urgent
    stored = parse_state(render_state(session.learned), "u1", session.learned.plan)
    assert stored.revisions == {URI: FIRST}
    later, revision = tick(pod("late", model=SECOND))
    assert (revision, mounted(later)) == (FIRST, {URI: FIRST})


def container(spec: Mapping[str, Any], group: str) -> tuple[dict[str, str], set[str]]:
    first = spec["spec"][group][0]
    env = {item["name"]: item.get("value", "") for item in first["env"]}
    return env, {mount["mountPath"] for mount in first["volumeMounts"]}


def test_both_containers_read_the_mounted_commits_of_unpinned_models_only() -> None:
    made = pod_template(deployment(), DEFAULTS)
    for group in ("initContainers", "containers"):
        env, mounts = container(made, group)
        assert env[Env.revisions_path].rpartition("/")[0] in mounts
    pinned = pod_template(deployment(f"{URI}@{FIRST}", "embedded://d"), DEFAULTS)
    for group in ("initContainers", "containers"):
        assert Env.revisions_path not in container(pinned, group)[0]


@pytest.mark.parametrize(
    ("container", "exit_code", "message", "expected"),
    [
        ("pull", 0, Revisions(revisions={URI: FIRST}).model_dump_json(), {URI: FIRST}),
        ("pull", 1, Revisions(revisions={URI: FIRST}).model_dump_json(), {}),
        ("other", 0, Revisions(revisions={URI: FIRST}).model_dump_json(), {}),
        ("pull", 0, '{"revisions": {"hf://org/model": "../../x"}}', {}),
        ("pull", 0, "{", {}),
        ("pull", 0, "", {}),
    ],
)
def test_commits_are_read_from_the_message_of_a_pull_that_succeeded(
    container: str, exit_code: int, message: str, expected: Mapping[str, str]
) -> None:
    ended = {"name": container, "state": {"terminated": {"exitCode": exit_code, "message": message}}}
    worker = worker_of({"metadata": {"name": "p", "uid": "p"}, "status": {"initContainerStatuses": [ended]}})
    assert worker.revisions == expected
