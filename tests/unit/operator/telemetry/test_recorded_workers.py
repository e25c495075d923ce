"""Reports of real workers of earlier revisions, recorded by recorded/record.py: this operator reads all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.telemetry.deltas import difference
from specdecode_operator.telemetry.report_validation import read_report
from specdecode_worker.contract import (
    SUPPORTED_CONTRACT_VERSIONS,
    Buckets,
    Plan,
    PlanRow,
    Report,
    TaskMatch,
    TreeShape,
)
from support.kube import ROOT
from support.tiers import skip_reason

RECORDINGS = sorted((Path(__file__).parent / "recorded").glob("*.json"))
BUCKETS = Buckets()


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recording(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def reports_of(recording: dict[str, Any]) -> tuple[Report, Report]:
    before, after = (read_report(json.dumps(report).encode()) for report in recording["reports"])
    return before, after


def test_there_are_recordings() -> None:
    assert [path.stem for path in RECORDINGS] == ["8e03220", "e7feb28"]


def test_a_recorded_report_is_read(recording: dict[str, Any]) -> None:
    for report in reports_of(recording):
        assert report.contract_version in SUPPORTED_CONTRACT_VERSIONS
        assert report.draft.method == "eagle3"
        assert report.steps
        assert report.max_num_seqs > 1


def test_recorded_reports_give_differences(recording: dict[str, Any]) -> None:
    before, after = reports_of(recording)
    delta = difference(before, after, at=100, buckets=BUCKETS)
    assert delta is not None
    assert delta.drafts > 0
    assert delta.draft_tokens >= delta.accepted_tokens
    # Prompts give 4 first tokens; the last step of a request may accept more tokens than are wanted.
    assert 0 <= delta.drafts + delta.plain_steps + delta.accepted_tokens + 4 - delta.output_tokens <= 4
    assert sum(delta.traffic[task].finished for task in delta.traffic) == 4
    assert set(delta.traffic) == {"code", "other"}
    assert any(key[1] == 1 for key in delta.acceptance)
    assert sum(moments.count for moments in delta.steps.values()) > 0


def test_the_recorded_worker_ran_the_plan_of_this_contract(recording: dict[str, Any]) -> None:
    pushed = Plan.model_validate(recording["plan"])
    for report in reports_of(recording):
        assert (report.plan.version, report.plan.draft, report.plan.matches_draft) == (7, pushed.draft, True)
        assert report.plan.buckets == pushed.buckets


# --- plans of today in the contract of a recorded revision ------------------------------------------------------------

READ_PLAN = """
import sys
from specdecode_worker.contract import Plan
assert Plan.__module__ and "{folder}" in sys.modules[Plan.__module__].__file__
plan = Plan.model_validate_json(sys.stdin.read())
print(plan.version, len(plan.rows), plan.rows[0].shape.depth, plan.quiet, plan.tasks[0].name)
"""


def unpack_contract(revision: str, folder: Path) -> None:
    """Unpack the contract of a revision. Skip the test where the history is not there."""
    words = ["git", "archive", revision, "worker/specdecode_worker/__init__.py", "worker/specdecode_worker/contract"]
    archived = subprocess.run(words, cwd=ROOT, capture_output=True)
    if archived.returncode:
        pytest.skip(skip_reason("git", f"no revision {revision}: {archived.stderr.decode()[:200]}"))
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=archived.stdout, check=True)


def test_a_recorded_worker_reads_a_plan_of_today(recording: dict[str, Any], tmp_path: Path) -> None:
    unpack_contract(recording["revision"], tmp_path)
    shape = TreeShape.levels(2, 1, 1)
    rows = tuple(PlanRow(concurrency=i, context=0, task="code", shape=shape) for i in range(4))
    plan = Plan(uid="u", version=12, draft="d", rows=rows, max_depth=5, tasks=(TaskMatch(name="code", draft="d2"),))
    read = subprocess.run(
        [sys.executable, "-c", READ_PLAN.format(folder=tmp_path)],
        input=plan.model_dump_json(),
        env={"PYTHONPATH": str(tmp_path / "worker")},
        text=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == ["12", "4", "3", "False", "code"]
