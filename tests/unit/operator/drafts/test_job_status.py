"""Status of a distillation Job from literal manifests, as a cluster writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_operator.drafts.job_status import JobState, JobStatus, job_status

BETTER = {
    "kind": "specdecode-distillation",
    "contract_version": 1,
    "verdict": "better",
    "reasons": ["mix: gain above +4.0%"],
    "gain": {"estimate": 0.06, "lower": 0.04, "upper": 0.08},
    "draft": {"uri": "pvc://drafts/g3/head", "hash": "0123456789abcdef"},
    "conversations": 812,
    "seconds": 1834.2,
}
UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def job(*conditions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo-distill-g3"},
        "spec": {"backoffLimit": 3, **fields.pop("spec", {})},
        "status": {"conditions": list(conditions), **fields},
    }  # fmt: skip


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(phase: str, *conditions: dict[str, Any], minute: int = 0, **status: Any) -> dict[str, Any]:
    created = f"2026-11-25T10:{minute:02}:00Z"
    return {
        "metadata": {"name": f"demo-distill-g3-{minute}", "creationTimestamp": created},
        "status": {"phase": phase, "conditions": list(conditions), **status},
    }


def ended(exit_code: int, reason: str, message: str = "", name: str = "distill") -> list[dict[str, Any]]:
    terminated = {"exitCode": exit_code, "reason": reason, "message": message}
    return [{"name": name, "state": {"terminated": terminated}}]


KILLED = pod("Failed", containerStatuses=ended(137, "OOMKilled"))
BROKEN = pod("Failed", containerStatuses=ended(1, "Error", "Traceback\nRuntimeError: CUDA error"))
PREEMPTED = pod(
    "Failed", condition("DisruptionTarget", "PreemptionByScheduler", "default-scheduler: preempting to accommodate"),
    containerStatuses=ended(143, "Error"),
)  # fmt: skip
IMAGE = [{"name": "distill", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]
CREATING = [{"name": "distill", "state": {"waiting": {"reason": "ContainerCreating"}}}]
EVICTED = pod("Failed", reason="Evicted", message="The node was low on resource: memory. Container distill was using")
SUSPENDED = condition("Suspended", "JobSuspended", "Job suspended")
LIMIT = condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")


@pytest.mark.parametrize(
    ("manifest", "pods", "state", "reason"),
    [
        (job(), [], JobState.PENDING, ""),
        (job(), [pod("Pending", containerStatuses=CREATING)], JobState.PENDING, ""),
        (job(), [pod("Pending", containerStatuses=IMAGE)], JobState.PENDING, "ErrImagePull: no such image"),
        (
            job(), [pod("Pending", condition("PodScheduled", "Unschedulable", UNSCHEDULABLE, "False"))],
            JobState.UNSCHEDULABLE, UNSCHEDULABLE,
        ),
        (job(spec={"suspend": True}), [], JobState.SUSPENDED, "queue"),
        (job(SUSPENDED, spec={"suspend": True}), [PREEMPTED], JobState.SUSPENDED, "Job suspended"),
        (job(active=1), [pod("Running", condition("PodScheduled"))], JobState.RUNNING, ""),
        (job(), [PREEMPTED], JobState.PREEMPTED, "PreemptionByScheduler: default-scheduler: preempting"),
        (job(), [PREEMPTED, pod("Running", minute=5)], JobState.RUNNING, ""),
        (job(failed=1), [KILLED], JobState.RETRYING, "distill: OOMKilled, exit code 137"),
        (job(LIMIT), [BROKEN, {**KILLED, "metadata": {"creationTimestamp": "2026-11-25T11:00:00Z"}}],
         JobState.OUT_OF_MEMORY, "backoff limit; distill: OOMKilled, exit code 137"),
        (job(LIMIT), [EVICTED], JobState.OUT_OF_MEMORY, "low on resource: memory"),
        (job(LIMIT), [BROKEN], JobState.FAILED, "exit code 1; RuntimeError: CUDA error"),
        (job(LIMIT), [], JobState.FAILED, "backoff limit"),
        (job(condition("FailureTarget", "PodFailurePolicy", "exit code 64 matching FailJob rule")),
         [pod("Failed", containerStatuses=ended(64, "Error"))], JobState.FAILED, "exit code 64"),
        (job(condition("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")), [],
         JobState.DEADLINE, "longer than specified deadline"),
        (job(condition("Complete")), [pod("Succeeded", containerStatuses=ended(0, "Completed", "a\nlog"))],
         JobState.FAILED, "without a verdict: log"),
        (job(condition("Complete")), [], JobState.FAILED, "its pods are gone"),
        (job(), [pod("Pending", initContainerStatuses=ended(1, "Error", "pull: no such model", "pull"))],
         JobState.PENDING, ""),
        (job(LIMIT), [pod("Failed", initContainerStatuses=ended(1, "Error", "pull: no such model", "pull"))],
         JobState.FAILED, "pull: Error, exit code 1; pull: no such model"),
    ],
)  # fmt: skip
def test_state_and_reason(manifest: dict[str, Any], pods: list[dict[str, Any]], state: JobState, reason: str) -> None:
    status = job_status(manifest, pods)
    assert status.state is state
    assert reason in status.reason
    assert status.verdict is None
    assert state.is_final == (state in ("Failed", "OutOfMemory", "DeadlineExceeded", "Finished"))


@pytest.mark.parametrize("conditions", [(condition("Complete"),), ()])
def test_verdict_is_read_from_the_newest_pod(conditions: tuple[dict[str, Any], ...]) -> None:
    done = pod("Succeeded", minute=9, containerStatuses=ended(0, "Completed", json.dumps(BETTER)))
    status = job_status(job(*conditions, failed=1), [done, PREEMPTED])
    assert status.state == JobState.FINISHED
    assert (status.verdict.verdict, status.verdict.seconds) == ("better", 1834.2)
    assert status.verdict.draft.hash == "0123456789abcdef"
    assert status.reason == "mix: gain above +4.0%"


def test_failure_of_the_run_is_a_finished_job() -> None:
    failure = {"verdict": "failed", "failure": "disk-full", "reasons": ["No space left on device"], "later": 1}
    done = pod("Succeeded", containerStatuses=ended(0, "Completed", json.dumps(failure)))
    status = job_status(job(condition("Complete")), [done])
    assert (status.state, status.reason) == (JobState.FINISHED, "No space left on device")
    assert status.verdict.failure == "disk-full"


@pytest.mark.parametrize(
    "message",
    [
        json.dumps({**BETTER, "verdict": "excellent"}),
        json.dumps({**BETTER, "gain": {"estimate": 1e999, "lower": 0, "upper": 0}}),
        json.dumps(BETTER)[:-20],
        "{" * 4096,
    ],
)
def test_forged_or_cut_message_is_no_verdict(message: str) -> None:
    done = pod("Succeeded", containerStatuses=ended(0, "Completed", message))
    assert job_status(job(condition("Complete")), [done]).state is JobState.FAILED


def test_verdict_of_a_pod_that_failed_does_not_count() -> None:
    failed = pod("Failed", containerStatuses=ended(1, "Error", json.dumps(BETTER)))
    assert job_status(job(), [failed]).verdict is None


def test_missing_fields_and_long_words_are_no_error() -> None:
    assert job_status({}, [{}]) == JobStatus(state=JobState.PENDING)
    long = condition("PodScheduled", "Unschedulable", "x" * 9000, "False")
    assert len(job_status(job(), [pod("Pending", long)]).reason) == 500


def test_the_end_of_a_job_may_be_seen_before_that_of_its_pod() -> None:
    complete = job(condition("Complete"))
    assert job_status(complete, [pod("Running")]).state is JobState.RUNNING
    done = pod("Succeeded", containerStatuses=ended(0, "Completed", json.dumps(BETTER)))
    assert job_status(complete, [done]).state is JobState.FINISHED
    assert job_status(complete, [pod("Succeeded")]).state is JobState.FAILED
