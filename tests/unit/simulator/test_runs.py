"""Whole runs: the same seed is the same run, no request is lost, and a planner that errs costs time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.policies import operator_loop
from specdecode_simulator.policies.engine_rules import Fixed
from specdecode_simulator.policies.operator_loop import DEEPEST, Look, Ours
from specdecode_simulator.policies.registry import InEngine, controller
from specdecode_simulator.records.acceptance_walks import DEPTH, PLAIN, chain
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.scoring.matrix import Cell, Matrix
from specdecode_simulator.scoring.run import ANSWERED, one, run_trace
from specdecode_simulator.traces.catalogue import TRACES, named
from specdecode_simulator.traces.job import Job, Limits
from specdecode_simulator.traces.trace import Kind, Trace, flat, square
from specdecode_simulator.world.counters import MOST_STEP_CELLS, Counters, Features, Names, UnreadCounters
from specdecode_simulator.world.fleet import Fleet
from specdecode_simulator.world.segment import Load, Outcome, Segment
from specdecode_simulator.world.truth import Truth
from specdecode_simulator.world.worker import Worker
from specdecode_worker.contract import MAX_RANKS, Plan, PlanRow, PlanState, TreeShape
from specdecode_worker.engine.stats import StepCosts, StepSize
from support.small_simulation import table_of


def small(**fields: Any) -> Trace:
    given: dict[str, Any] = {
        "name": "small",
        "family": "stationary",
        "seconds": 600.0,
        "table": "smollm2-cpu",
        "kinds": (Kind(domain="qa", prompt=64, output=64),),
        "rate": flat(0.4),
        **fields,
    }
    return Trace(**given)


@pytest.mark.parametrize("policy", ["ours", "turbospec", "constrained"])
def test_the_same_seed_is_the_same_run(policy: str, library: Library) -> None:
    trace = small(seconds=240.0)
    one_run, again = (one(policy, trace, library, 1, {}, None) for _ in range(2))
    other = one(policy, trace, library, 2, {}, None)
    assert one_run == again
    assert one_run.figures != other.figures


TIGHT = small(limits=Limits(max_num_seqs=16, kv_tokens=700), rate=flat(1.5))
IMPATIENT = small(rate=flat(2.0), limits=Limits(max_num_seqs=4), patience_seconds=5.0)


@pytest.mark.parametrize(
    "trace",
    [
        small(),
        small(rate=flat(3.0), limits=Limits(max_num_seqs=4)),
        TIGHT,
        IMPATIENT,
        replace(named("burst", 0.15), patience_seconds=3.0),
    ],
    ids=["quiet", "flooded", "short of KV", "impatient", "scaled"],
)
def test_no_request_is_lost(trace: Trace, library: Library) -> None:
    """Workers preempt requests when KV blocks run out, and impatient clients give up; both are counted."""
    fleet = Fleet(trace, library, 0)
    fleet.run(controller("hpa-requests" if trace.is_scaled else "fixed-3", trace, library, 0, {}))
    finished = sum(job.done is not None for job in fleet.jobs[: fleet.arrivals])
    assert fleet.arrivals > 50
    assert fleet.arrivals == finished + fleet.in_flight + fleet.given_up
    assert fleet.arrivals == len(fleet.jobs)
    done = [job for job in fleet.jobs if job.done is not None]
    assert all(job.first is not None and job.arrived <= job.first <= job.done for job in done if job.done)
    assert trace is not TIGHT or sum(worker.counters.preemptions for worker in fleet.workers) > 0
    assert trace is not IMPATIENT or min(fleet.retried, fleet.given_up) > 0


def test_counters_only_rise_and_hold_together(library: Library) -> None:
    trace = small(seconds=300.0)
    decides = Ours(trace, 0, scaled=False)
    fleet = Fleet(trace, library, 0)
    reports = []
    poll = decides.poll

    class Watched:
        def pilot(self, fleet: Fleet, index: int) -> Any:
            return decides.pilot(fleet, index)

        def poll(self, fleet: Fleet, now: float) -> int | None:
            worker = fleet.pods[0].worker
            reports.append(worker.report("b", worker.pilot.state, ()))  # type: ignore[attr-defined]
            return poll(fleet, now)

    fleet.run(Watched())
    for before, after in pairwise(reports):
        assert after.drafts >= before.drafts
        assert after.running_request_seconds >= before.running_request_seconds
        assert after.waiting_request_seconds >= before.waiting_request_seconds - 1e-9
        ranks = {(cell.task, cell.depth): cell.ranks for cell in after.acceptance}
        for cell in before.acceptance:
            assert all(new >= old for new, old in zip(ranks[cell.task, cell.depth], cell.ranks, strict=True))
    last = reports[-1]
    by_depth = {cell.depth: cell for cell in last.acceptance}
    assert by_depth[1].total >= last.drafts
    assert all(by_depth[d].ranks[0] >= by_depth[d + 1].total for d in range(1, len(by_depth)))
    emitted = sum(cell.output_tokens for cell in last.traffic)
    assert emitted == pytest.approx(last.drafts + last.plain_steps + last.accepted_tokens, rel=0.05)
    assert sum(cell.t for cell in last.steps) <= 300.0


def test_a_prompt_is_read_no_faster_because_the_other_requests_end_meanwhile(library: Library) -> None:
    truth = Truth(table_of(0.0001), library.records, lambda kind, now, context: 0.0, lambda now: 1.0)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=100)
    worker = Worker(0, truth, limits, Fixed(0), UnreadCounters(counters().names, None), 0.0, 0)
    short = Job(id=0, arrived=0.0, label=0, kind=0, prompt=8, output=21, root=0)
    long = Job(id=1, arrived=0.27, label=0, kind=0, prompt=1000, output=4, root=0)
    for job in (short, long):
        worker.offer(job)
    worker.run(3.0)
    assert short.done is not None
    assert long.first is not None
    assert 0.27 < short.done < long.first
    assert long.first - long.arrived > worker.truth.table.prefill_seconds(1000.0)


def test_drafts_of_one_length_are_no_changes_however_many_of_them_are_verified(library: Library) -> None:
    trace = small(seconds=60.0)
    for policy, is_changing in (("vllm-adaptive", False), ("vllm-table", True)):
        figures = one(policy, trace, library, 0, {"vllm-table": {"edges": (1,), "depths": (3, 1)}}, None).figures
        assert (figures.plan_changes_per_hour > 0) is is_changing


def counters() -> Counters:
    """Counters of one task, whose misses are beyond all ranks."""
    tails = np.broadcast_to(np.arange(MAX_RANKS + 1) == MAX_RANKS, (2, DEPTH, MAX_RANKS + 1)).astype(float)
    return Counters(Names(("other",), ("qa",), lambda kind: tails), np.random.default_rng(0))


@dataclass
class InSegments:
    """One depth, in segments of at most so many steps."""

    depth: int
    most_steps: int

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(self.depth)), self.most_steps)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


def in_segments_and_step_by_step(trace: Trace, library: Library) -> list[Fleet]:
    """Return two runs of the same requests."""
    fleets = [Fleet(trace, library, 0), Fleet(trace, library, 0)]
    for fleet, most_steps in zip(fleets, (127, 1), strict=True):
        pilot = InSegments(3, most_steps)
        fleet.run(InEngine(lambda table, pilot=pilot: pilot))
    return fleets


@pytest.mark.parametrize("trace", [named("prompt-bound", 0.1), small(), small(rate=flat(1.2))], ids=lambda t: t.name)
def test_requests_take_as_long_in_segments_as_step_by_step(trace: Trace, library: Library) -> None:
    """Prompts are read as soon as they arrive, and steps are those of the requests that still run."""
    workers = [fleet.pods[0].worker for fleet in in_segments_and_step_by_step(trace, library)]
    once, stepwise = (worker.decode_seconds / worker.tokens for worker in workers)
    assert once == pytest.approx(stepwise, rel=0.006)


def test_acceptance_is_reported_as_if_every_step_were_counted_alone(library: Library) -> None:
    """A request ends with a step in the middle of a segment; its tokens do not depend on when they come."""
    trace = small(rate=lambda t: 0.4 if t < 500 else 0.0)
    fleets = in_segments_and_step_by_step(trace, library)
    assert all(fleet.in_flight == 0 for fleet in fleets)
    once, stepwise = (fleet.pods[0].worker.report("b", PlanState(), ()) for fleet in fleets)
    assert once.requests == stepwise.requests
    assert [(cell.ranks[0], cell.total) for cell in once.acceptance] == [
        (cell.ranks[0], cell.total) for cell in stepwise.acceptance
    ]
    assert (once.drafts, once.accepted_tokens) == (stepwise.drafts, stepwise.accepted_tokens)


def test_a_report_has_the_kinds_of_step_that_a_workers_has() -> None:
    """Those of the latest steps: a shape that begins to run must not stay behind the others."""
    found, engine = counters(), StepCosts()
    often = ((passes, 50) for passes in range(2, MOST_STEP_CELLS + 1))
    for passes, steps in ((1, 90), *often, (70, 1), (1, 1), (71, 1)):
        x = Features(sequences=1.0, verify_tokens=4.0, kv_tokens=100.0, draft_passes=passes, prefill_tokens=0.0)
        size = StepSize(sequences=1, verify_tokens=4, kv_tokens=100, draft_passes=passes, prefill_tokens=0)
        found.timed(x, 0, steps, 0.02 * steps, 0.02**2 * steps, 2.0 * steps)
        for _ in range(steps):
            engine.add(0, size, 2, 0.02)
    reported = found.report(0.0, boot_id="b", worker="b", clock_seconds=1.0).steps
    expected = engine.cells(MOST_STEP_CELLS)
    assert [(cell.draft_passes, cell.count) for cell in reported] == [(c.draft_passes, c.count) for c in expected]
    assert {1, 70, 71} < {cell.draft_passes for cell in reported}


@pytest.mark.slow
def test_a_planner_that_errs_shows_as_regret(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the plan that goes out has every depth mirrored, as an inverted gain would, and no guard stops it."""
    trace = small(seconds=600.0, kinds=(Kind(domain="qa", quality=flat(-0.3), prompt=64, output=96),), rate=flat(0.3))
    right = one("ours", trace, library, 0, {}, None).figures.time_per_token
    decide = operator_loop.decide

    def inverted(*given: Any, **named_ones: Any) -> Any:
        decision, memory = decide(*given, **named_ones)
        rows = tuple(
            row.model_copy(update={"shape": TreeShape.chain(DEEPEST - row.shape.depth)}) for row in decision.plan.rows
        )
        return replace(decision, plan=decision.plan.model_copy(update={"rows": rows, "guard": False})), memory

    monkeypatch.setattr(operator_loop, "decide", inverted)
    wrong = one("ours", trace, library, 0, {}, None).figures.time_per_token
    assert wrong > 1.3 * right


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task-mix", "load-swings"])
def test_the_loop_comes_near_the_best_shapes_and_beats_every_fixed_depth(name: str, library: Library) -> None:
    """Tasks, trees and the worker's own guard in one closed loop."""
    fixed = [f"fixed-{depth}" for depth in (0, 2, 3, 5)]
    runs = dict(run_trace(name, 0.2, 3, ["ours", "clairvoyant", *fixed], library, {}))
    seconds = {policy: run.figures.time_per_token for policy, run in runs.items()}
    assert seconds["ours"] < 1.12 * seconds["clairvoyant"]
    assert seconds["ours"] < min(seconds[policy] for policy in fixed)


def test_every_trace_is_drawn_and_runs(library: Library) -> None:
    for name in TRACES:
        trace = named(name, 0.02)
        assert trace.name == name
        fleet = Fleet(trace, library, 0)
        fleet.run(InEngine(lambda table: Fixed(1)))
        assert fleet.now == pytest.approx(trace.seconds)


def test_the_operator_knows_the_limits_of_the_modelled_workers() -> None:
    """The chunks of a prompt, and with them its time to the first token, follow from the batched tokens of a step."""
    for name in ("steady-cpu-quiet", "steady-gpu"):
        trace = named(name, 0.02)
        engine = operator_loop.deployment_for(trace, scaled=False).spec.engine
        assert engine.max_num_batched_tokens == trace.limits.max_num_batched_tokens
        assert engine.max_num_seqs == trace.limits.max_num_seqs


def test_an_operator_that_is_away_decides_nothing_and_remembers(library: Library) -> None:
    trace = small(seconds=400.0, away=lambda t: 100 <= t < 300)
    decides = Ours(trace, 0, scaled=False)
    Fleet(trace, library, 0).run(decides)
    looks = [look.at for look in decides.looks]
    assert not [at for at in looks if 100 <= at < 300]
    assert looks[-1] > 390
    plans = decides.memory.learned.plan
    assert plans.version >= 1


@pytest.mark.slow
def test_a_step_is_answered_and_no_later_where_more_is_allowed(library: Library) -> None:
    kind = Kind(domain="qa", quality=square(1200.0, 0.6, -0.6), prompt=64, output=64)
    trace = small(seconds=1200.0, kinds=(kind,), steps_at=(600.0,))
    taken = []
    for seed in range(6):
        strict, near = one("ours", trace, library, seed, {}, None).answers
        assert (strict["at"], strict["within"], near["within"]) == (600.0, *ANSWERED)
        assert near["answered"]
        assert 0 < near["seconds"] <= strict["seconds"]
        assert near["seconds"] <= 200, "the slowest of six seeds takes 190 s"
        assert 0 <= near["drafts"] <= strict["drafts"]
        taken += [strict["seconds"]] if strict["answered"] else []
    assert len(taken) >= 4, "the gain between neighbouring shapes is small, and ten minutes are short"
    assert max(taken) < 300


def test_the_shape_in_use_is_that_of_the_load_that_is_asked_for() -> None:
    rows = tuple(PlanRow(concurrency=c, context=0, shape=TreeShape.chain(depth)) for c, depth in enumerate((5, 2)))
    look = Look(0.0, 0, Plan(version=1, rows=rows, initial=TreeShape.chain(3)), set())
    assert [look.form(sequences, 96, "other").depth for sequences in (1, 2, 3)] == [5, 2, 3]
    assert look._replace(suspended={(0, 0)}).form(1, 96, "other") is PLAIN


def test_a_run_that_fails_is_told_before_the_others_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(self: Matrix, trace: str, seed: int) -> Cell:
        (self.recordings / str(seed)).touch()
        if seed == 0:
            raise SimulatorError("planted")
        time.sleep(0.02)
        return trace, seed, {}

    monkeypatch.setattr(Matrix, "cell", cell)
    matrix = Matrix(traces=("steady-gpu",), seeds=60, hours=1, recordings=tmp_path)
    with pytest.raises(SimulatorError, match="planted"):
        list(matrix.run(jobs=2))
    assert len(list(tmp_path.iterdir())) < 20


def test_runs_are_grouped_in_one_order() -> None:
    """Two processes end their runs in any order; the document must not depend on it."""
    ended: list[Cell] = [(trace, seed, {}) for trace in ("steady-gpu", "steady-cpu-quiet") for seed in (11, 10)]
    traces = ("steady-cpu-quiet", "steady-gpu")
    found = Matrix(traces=traces, first_seed=10, seeds=2, hours=1, recordings=Path()).by_trace(ended)
    assert [(trace, list(runs)) for trace, runs in found.items()] == [
        ("steady-cpu-quiet", [10, 11]),
        ("steady-gpu", [10, 11]),
    ]
