"""Whatever finite numbers reports carry, decisions are made, within bounds, and the same for the same input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import LearnedState, Session, parse_state, render_state
from specdecode_operator.telemetry.counters import PAIRS, K
from specdecode_operator.types import Observation, Worker
from specdecode_worker.contract import (
    AcceptanceCell,
    DraftState,
    GuardCell,
    PlanState,
    Report,
    RequestCell,
    StepCell,
    TrafficCell,
)
from support.operators.fleet import DEFAULTS, deployment_with, workload_with

counts = st.integers(0, 10**9)
seconds = st.floats(0, 1e12)
names = st.sampled_from(["other", "code", "unknown"])


def with_numbers(kind: type[BaseModel], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return records with the given fields, and any numbers in the others that are numbers."""
    numbers = {int: counts, float: seconds}
    fields = kind.model_fields.items()
    others = {name: numbers[field.annotation] for name, field in fields if field.annotation in numbers}
    return st.builds(kind, **{**others, **given})


def sums(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(seconds, min_size=count, max_size=count).map(tuple)


cells = with_numbers(
    AcceptanceCell,
    draft=st.just("d1"),
    task=names,
    sampled=st.booleans(),
    depth=st.integers(1, 16),
    parent=st.sampled_from(["main", "sibling"]),
    ranks=st.lists(counts, min_size=9, max_size=9).map(tuple),
)
steps = with_numbers(
    StepCell,
    tokens_bucket=st.integers(1, 1 << 12),
    draft_passes=st.integers(0, 16),
    prefill=st.booleans(),
    context_bucket=st.integers(0, 2),
    x=sums(K),
    xx=sums(len(PAIRS)),
    xt=sums(K),
)
requests = with_numbers(RequestCell, draft=st.just("d1"), task=names, sampled=st.booleans())
traffic = with_numbers(TrafficCell, task=names)
guards = st.builds(
    GuardCell,
    concurrency=st.integers(0, 40),
    context=st.integers(0, 3),
    speculative=st.none() | seconds,
    plain=st.none() | seconds,
    suppressed=st.booleans(),
)
reports = with_numbers(
    Report,
    boot_id=st.sampled_from(["a", "a", "a", "b"]),
    clock_seconds=st.floats(0, 1e4),
    draft=st.builds(DraftState, method=st.just("eagle3"), hash=st.sampled_from(["d1", "d2", ""])),
    plan=st.builds(PlanState, uid=st.just("u1"), version=st.integers(0, 50), quiet=st.booleans()),
    max_num_seqs=st.integers(1, 1024),
    acceptance=st.lists(cells, max_size=5).map(tuple),
    requests=st.lists(requests, max_size=2).map(tuple),
    steps=st.lists(steps, max_size=6).map(tuple),
    traffic=st.lists(traffic, max_size=3).map(tuple),
    guard=st.lists(guards, max_size=2).map(tuple),
)
SPEC: dict[str, Any] = {
    "speculation": {
        "tree": {"topK": 2, "maxNodes": 6},
        "depth": {"max": 4},
        "objective": {"itl": "30ms", "ttft": "500ms"},
        "tasks": [{"name": "code"}],
        "limits": {"min_dwell_seconds": 0},
    },
    "scaling": {"owner": "Operator", "maxReplicas": 5},
    "workers": {"recycle": "OnCollapse"},
}
RISING = ("drafts", "draft_tokens", "accepted_tokens", "plain_steps", "running_request_seconds", "clock_seconds")


def later(before: Report | None, after: Report) -> Report:
    """Return the report with counters above those of ``before``. Its cells may change in any way."""
    if before is None or before.boot_id != after.boot_id:
        return after
    return after.model_copy(update={name: getattr(before, name) + getattr(after, name) for name in RISING})


@pytest.mark.slow
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.lists(reports, min_size=1, max_size=2), min_size=2, max_size=5))
def test_any_reports_make_a_decision_within_bounds(looks: list[list[Report]]) -> None:
    deployment, memory, now = deployment_with(**SPEC), Session(learned=LearnedState(uid="u1")), 1e6
    last: dict[int, Report] = {}
    for look in looks:
        now += 5
        last.update({i: later(last.get(i), report) for i, report in enumerate(look)})
        workers = tuple(
            Worker(name=f"p{i}", uid=f"p{i}", address=f"at-{i}", ready=True, report=last[i]) for i in range(len(look))
        )
        observed = Observation(workload=workload_with(len(workers)), workers=workers, session=memory)
        decision, memory = decide(deployment, observed, DEFAULTS, now=now)
        assert (decision, memory) == decide(deployment, observed, DEFAULTS, now=now)
        assert 1 <= decision.scale.replicas <= 5
        assert len(decision.health.recycle) <= 1
        for row in decision.plan.rows:
            assert (row.shape.depth <= 4, row.shape.nodes <= 6, max(row.shape.ranks) < 2) == (True, True, True)
        assert parse_state(render_state(memory.learned), "u1", memory.learned.plan) is not None
