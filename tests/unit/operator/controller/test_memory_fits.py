"""A worker's termination message becomes MemoryFits, DraftCompatible and status.memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdecode_operator.controller.children import worker_of
from specdecode_operator.types import Worker
from specdecode_worker.contract import CheckVerdict, DraftState, MemoryState, Report
from support.operators.fleet import workload_with
from support.operators.statuses import conditions, states, status_with

GIB = 2**30
PROBLEM = "the container's memory limit of 2.00 GiB leaves no room for keys and values: 0.26 GiB short; lower it"
TOO_LARGE = CheckVerdict(
    serves=False,
    fits=False,
    problem=PROBLEM,
    arithmetic=("container's memory limit  2.00 GiB", "- reserve of 20%  -0.40 GiB"),
    memory=MemoryState(limit=2 * GIB, weights=3 * GIB // 2, reserve=2 * GIB // 5),
    kv_tokens=0,
)
MISFIT = CheckVerdict(serves=False, fits=True, draft_problem="fc.weight is missing")


def pod(message: str, *, when: str = "lastState", ready: bool = False) -> Worker:
    """Return a pod as the kubelet reports a worker that ended and is started again."""
    container: dict[str, Any] = {"name": "worker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    container[when] = {"terminated": {"exitCode": 1, "message": message}}
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"podIP": "10.0.0.2", "containerStatuses": [container], "conditions": conditions}
    return worker_of({"metadata": {"name": "new", "uid": "new"}, "status": status})


def serving() -> Worker:
    memory = MemoryState(limit=4 * GIB, weights=GIB, drafts=GIB // 10, kv_cache=GIB // 2, reserve=GIB)
    draft = DraftState(method="eagle3", hash="d")
    report = Report(boot_id="b", worker="w", clock_seconds=1, draft=draft, memory=memory, kv_tokens_total=5000)
    return Worker(name="old", uid="old", address="10.0.0.1", ready=True, report=report)


@pytest.mark.parametrize("when", ["state", "lastState"])
def test_a_verdict_is_read_from_the_termination_message(when: str) -> None:
    assert pod(TOO_LARGE.model_dump_json(), when=when).verdict == TOO_LARGE
    assert pod(TOO_LARGE.model_dump_json(), ready=True).verdict is None, "the worker serves now"


@pytest.mark.parametrize(
    "message", ["", "Killed", "{", "{}", '{"kind": "other", "serves": false, "fits": true}', "[1]"]
)
def test_other_termination_messages_are_no_verdict(message: str) -> None:
    assert pod(message).verdict is None


def test_a_verdict_is_bounded() -> None:
    long = TOO_LARGE.model_dump() | {"problem": "x" * 3000}
    assert pod(json.dumps(long)).verdict is None


def test_memory_that_does_not_fit_is_shown_with_its_arithmetic() -> None:
    status = status_with(workload_with(available=0), pod(TOO_LARGE.model_dump_json()))
    assert states(status)["MemoryFits"] == ("False", "DoesNotFit")
    assert PROBLEM in conditions(status)["MemoryFits"].message
    assert "- reserve of 20%" in conditions(status)["MemoryFits"].message
    assert (status.memory.limit, status.memory.weights, status.memory.kv_tokens) == ("2.00Gi", "1.50Gi", 0)
    assert conditions(status)["Ready"].message == f"pod new: {PROBLEM}"
    assert conditions(status)["Stalled"].reason == "DoesNotFit"


def test_memory_that_fits_is_read_from_the_report() -> None:
    status = status_with(workload_with(), serving())
    shown = conditions(status)["MemoryFits"]
    assert shown.status == "True"
    assert shown.message == "after the weights there is room for 5000 tokens of keys and values"
    assert status.memory.model_dump(exclude_none=True) == {
        "limit": "4.00Gi",
        "weights": "1.00Gi",
        "drafts": "0.10Gi",
        "kv_cache": "0.50Gi",
        "reserve": "1.00Gi",
        "kv_tokens": 5000,
    }


def test_a_new_worker_that_does_not_fit_leaves_the_old_one_serving() -> None:
    status = status_with(workload_with(), serving(), pod(TOO_LARGE.model_dump_json()))
    assert (states(status)["MemoryFits"][0], states(status)["Available"][0]) == ("False", "True")
    assert conditions(status)["Ready"].reason == "DoesNotFit"
    assert status.memory.limit == "4.00Gi", "memory of the worker that serves"


def test_a_required_draft_that_does_not_match_the_target_is_refused() -> None:
    status = status_with(workload_with(), serving(), pod(MISFIT.model_dump_json()))
    assert states(status)["DraftCompatible"] == ("False", "DraftRefused")
    assert conditions(status)["DraftCompatible"].message == "fc.weight is missing; new workers do not start"
    assert states(status)["MemoryFits"][0] == "True"


def test_memory_is_unknown_without_a_report_and_then_stays() -> None:
    unknown, known = status_with(workload_with()), status_with(workload_with(), serving())
    assert states(unknown)["MemoryFits"][0] == "Unknown"
    assert unknown.memory is None
    assert status_with(workload_with(), before=known).memory == known.memory
