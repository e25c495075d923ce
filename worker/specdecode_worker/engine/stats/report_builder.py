"""Builder of the worker report (contract.Report), within its size limit."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.contract import (
    MAX_REPORT_BYTES,
    DraftState,
    GuardCell,
    MemoryState,
    PhaseSeconds,
    PlanState,
    Report,
    SyntheticKnobs,
    TrialState,
)
from specdecode_worker.engine.scheduler import Counters
from specdecode_worker.engine.stats.statistics import MAX_ACCEPTANCE_CELLS, MAX_STEP_CELLS, Statistics

_SERVER_FIELD_BYTES = 64
"""Bytes that the server process may add to the report: the compatibility key, and ``draining``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Properties of a worker that do not change while its engine runs."""

    boot_id: str
    worker: str
    model: str
    target: str
    max_num_seqs: int
    memory: MemoryState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """Current state of a worker, at ``clock_seconds`` of the monotonic clock."""

    clock_seconds: float
    draft: DraftState
    named_drafts: tuple[DraftState, ...]
    trial: TrialState | None = None
    running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    kv_tokens_cached: int
    counters: Counters
    plan: PlanState
    synthetic: SyntheticKnobs | None
    phases: PhaseSeconds
    guard: tuple[GuardCell, ...]


def build_report(identity: WorkerIdentity, snapshot: WorkerSnapshot, statistics: Statistics) -> Report:
    """Build the worker report, with at most MAX_REPORT_BYTES bytes of JSON.

    If the report is too large, step and acceptance cells with the lowest counts are left out. Their counters continue
    to accumulate, so a later report can include them again.
    """
    share, most_bytes = 1, MAX_REPORT_BYTES - _SERVER_FIELD_BYTES
    while True:
        report = Report(
            boot_id=identity.boot_id,
            worker=identity.worker,
            clock_seconds=snapshot.clock_seconds,
            model=identity.model,
            target=identity.target,
            draft=snapshot.draft,
            named_drafts=snapshot.named_drafts,
            trial=snapshot.trial,
            plan=snapshot.plan,
            synthetic=snapshot.synthetic,
            phases=snapshot.phases,
            max_num_seqs=identity.max_num_seqs,
            memory=identity.memory,
            running=snapshot.running,
            waiting=snapshot.waiting,
            running_request_seconds=statistics.running_request_seconds,
            waiting_request_seconds=statistics.waiting_request_seconds,
            kv_tokens_total=snapshot.kv_tokens_total,
            kv_tokens_used=snapshot.kv_tokens_used,
            kv_tokens_cached=snapshot.kv_tokens_cached,
            preemptions=snapshot.counters.preemptions,
            prefill_chunks=snapshot.counters.prefill_chunks,
            prefix_query_tokens=snapshot.counters.prefix_query_tokens,
            prefix_hit_tokens=snapshot.counters.prefix_hit_tokens,
            drafts=statistics.drafts,
            draft_tokens=statistics.draft_tokens,
            accepted_tokens=statistics.accepted_tokens,
            plain_steps=statistics.plain_steps,
            acceptance=statistics.acceptance_cells(MAX_ACCEPTANCE_CELLS // share),
            credit=statistics.credit_cells(MAX_ACCEPTANCE_CELLS // share),
            requests=statistics.request_cells(),
            steps=statistics.costs.cells(MAX_STEP_CELLS // share),
            traffic=statistics.traffic_cells(),
            latency=statistics.latency_cells(),
            tasks=statistics.task_cells(),
            guard=snapshot.guard,
        )
        if len(report.model_dump_json().encode()) <= most_bytes or share > MAX_ACCEPTANCE_CELLS:
            return report
        share *= 2
