"""Counters of a worker, sums of step costs, the recorder of steps, and the report of all."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from specdecode_operator.telemetry.counters import difference
from specdecode_operator.telemetry.polling import read_report
from specdecode_worker.contract import (
    FEATURES,
    MAX_DEPTH,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_TASKS,
    OTHER_TASK,
    Buckets,
    DraftState,
    LatencyHistogram,
    PlanState,
    Report,
    TreeShape,
)
from specdecode_worker.core.request import Request, Row
from specdecode_worker.engine.stats import (
    CLIP,
    MAX_STEP_CELLS,
    AcceptanceCategory,
    Histogram,
    RowResult,
    Statistics,
    StepCosts,
    StepRecorder,
    StepSize,
    build_report,
)
from specdecode_worker.sampling.trees import PLAIN, Tree, tree_of
from support.small_llama import identity
from support.worker.small_engine import request

TASKS = [f"task-{i}" for i in range(MAX_TASKS + 4)]


def labels(statistics: Statistics) -> list[set[str]]:
    """Return the task labels of traffic, acceptance and requests."""
    return [
        {cell.task for cell in cells}
        for cells in (statistics.traffic_cells(), statistics.acceptance_cells(1000), statistics.request_cells())
    ]


def use(statistics: Statistics, task: str) -> None:
    statistics.traffic(task).arrivals += 1
    statistics.record_rank(AcceptanceCategory(task, False, "d"), 1, main=True, rank=0)
    statistics.record_request(AcceptanceCategory(task, False, "d"), 3, 2)


@given(st.lists(st.sampled_from([*TASKS, OTHER_TASK]), max_size=40))
def test_at_most_eight_tasks_are_named_and_no_count_is_lost(tasks: list[str]) -> None:
    statistics = Statistics()
    for task in tasks:
        use(statistics, task)
    for task_labels in labels(statistics):
        assert len(task_labels - {OTHER_TASK}) <= MAX_TASKS
    assert sum(cell.arrivals for cell in statistics.traffic_cells()) == len(tasks)
    assert sum(cell.total for cell in statistics.acceptance_cells(1000)) == len(tasks)
    assert sum(cell.n for cell in statistics.request_cells()) == len(tasks)


def test_other_does_not_count_towards_the_eight_named_tasks() -> None:
    statistics = Statistics()
    for task in [OTHER_TASK, *TASKS[:MAX_TASKS], "one-too-many"]:
        use(statistics, task)
    assert labels(statistics) == [{OTHER_TASK, *TASKS[:MAX_TASKS]}] * 3
    other = next(cell for cell in statistics.traffic_cells() if cell.task == OTHER_TASK)
    assert other.arrivals == 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=20))
def test_request_sums_are_moments_of_accepted_and_drafts(pairs: list[tuple[int, int]]) -> None:
    statistics = Statistics()
    for accepted, drafts in pairs:
        statistics.record_request(AcceptanceCategory("a", False, "d"), accepted, drafts)
    (cell,) = statistics.request_cells()
    assert (cell.n, cell.a, cell.d) == (len(pairs), sum(a for a, _ in pairs), sum(d for _, d in pairs))
    assert cell.aa == sum(a * a for a, _ in pairs)
    assert cell.ad == sum(a * d for a, d in pairs)
    assert cell.dd == sum(d * d for _, d in pairs)


@pytest.mark.parametrize("name", ["ttft", "ttit", "e2e", "queue"])
def test_histogram_edges_are_inclusive_and_the_last_bucket_is_open(name: str) -> None:
    histogram = Histogram.of(name)  # type: ignore[arg-type]
    for edge in histogram.edges:
        histogram.add(edge)
    histogram.add(1e9)
    cell = LatencyHistogram.model_validate(histogram, from_attributes=True)
    assert cell.counts == (1,) * len(cell.edges) + (1,)
    assert list(cell.edges) == sorted(set(cell.edges))
    assert cell.sum == pytest.approx(sum(cell.edges) + 1e9)


SIZES = st.builds(
    StepSize,
    sequences=st.integers(1, 64),
    verify_tokens=st.integers(0, 600),
    kv_tokens=st.integers(0, 10**5),
    draft_passes=st.integers(0, 2),
    prefill_tokens=st.sampled_from([0, 0, 17]),
)
STEPS = st.lists(st.tuples(SIZES, st.integers(1, 30), st.floats(0.001, 0.1), st.integers(0, 1)), max_size=25)


def size(**change: int) -> StepSize:
    fields = {"sequences": 2, "verify_tokens": 4, "kv_tokens": 30, "draft_passes": 1, "prefill_tokens": 0}
    return StepSize(**{**fields, **change})


def test_x_has_the_features_in_the_order_of_the_contract() -> None:
    step_size = StepSize(sequences=2, verify_tokens=3, kv_tokens=4, draft_passes=5, prefill_tokens=6)
    assert dict(zip(FEATURES, step_size.x, strict=True)) == {"one": 1, **asdict(step_size)}


@pytest.mark.parametrize(("tokens", "edge"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_the_tokens_bucket_is_the_next_power_of_two(tokens: int, edge: int) -> None:
    assert size(verify_tokens=tokens).cell_key(0)[0] == edge
    assert size(verify_tokens=0, prefill_tokens=tokens).cell_key(0)[0] == edge, "a prompt's tokens are packed as well"


@given(STEPS)
def test_sums_equal_those_of_least_squares(steps: list[tuple[StepSize, int, float, int]]) -> None:
    costs = StepCosts()
    for step, emitted, seconds, context in steps:
        costs.add(context, step, emitted, seconds)
    cells = costs.cells(1000)
    assert sum(cell.count for cell in cells) == len(steps)
    for cell in cells:
        kind = (cell.tokens_bucket, cell.draft_passes, cell.prefill, cell.context_bucket)
        mine = [(s.x, e, t) for s, e, t, c in steps if s.cell_key(c) == kind]
        k = range(len(FEATURES))
        if cell.clipped:
            continue
        assert cell.x == pytest.approx([sum(x[i] for x, _, _ in mine) for i in k])
        assert cell.xx == pytest.approx([sum(x[i] * x[j] for x, _, _ in mine) for i in k for j in k if j >= i])
        assert cell.xt == pytest.approx([sum(x[i] * t for x, _, t in mine) for i in k])
        assert (cell.t, cell.tt) == pytest.approx((sum(t for *_, t in mine), sum(t * t for *_, t in mine)))
        assert (cell.wall_seconds, cell.device_seconds) == pytest.approx((cell.t, cell.t))
        assert cell.emitted == sum(e for _, e, _ in mine)


def test_many_steps_are_summed_as_few_are() -> None:
    costs, k, kv = StepCosts(), len(FEATURES), FEATURES.index("kv_tokens")
    upper = [(i, j) for i in range(k) for j in range(i, k)]
    for step in range(1, 201):
        costs.add(0, size(kv_tokens=123 * step), 1, 0.01)
        assert costs.cells(1)[0].x[kv] == 123 * sum(range(step + 1))
    for step in range(201, 401):
        costs.add(0, size(kv_tokens=123 * step), 1, 0.01)
    (cell,) = costs.cells(1)
    assert (cell.count, cell.x[0], cell.x[kv]) == (400, 400, 9_864_600)
    assert cell.xx[upper.index((kv, kv))] == sum((123 * step) ** 2 for step in range(401)), "readings are subtracted"
    assert cell.xx[upper.index((1, kv))] == 2 * 9_864_600
    assert cell.xt[kv] == pytest.approx(98_646)


def test_stall_is_clipped_and_reported() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.add(0, size(), 1, 0.01)
    costs.add(0, size(), 1, 5.0)
    (cell,) = costs.cells(1)
    assert cell.clipped == 1
    assert cell.t == pytest.approx(10 * 0.01 + CLIP * 0.01)
    assert cell.wall_seconds == pytest.approx(10 * 0.01 + 5.0), "wall seconds are never clipped"
    assert cell.xt[0] == pytest.approx(cell.t)


def test_clipping_ends_if_the_machine_stays_slower() -> None:
    costs = StepCosts()
    for seconds in [0.01] * 20 + [1.0] * 60:
        costs.add(0, size(), 1, seconds)
    (before,) = costs.cells(1)
    costs.add(0, size(), 1, 1.0)
    (after,) = costs.cells(1)
    assert after.clipped == before.clipped
    assert after.t - before.t == pytest.approx(1.0)


CHAIN = tree_of(TreeShape.chain(2))
WIDE = tree_of(TreeShape.levels(2, 1, 1))


def recorder() -> StepRecorder:
    return StepRecorder(Statistics())


def walk(
    into: StepRecorder, one: Request, tree: Tree, tokens: list[int], ranks: list[int], path: list[int], **read: object
) -> None:
    """Process a row as the engine does: advance the request, append its tokens, then call the recorder."""
    fields = {"ranked_NK": None, "depth_limit": 99, **read}
    one.cached += len(tokens)
    taken = one.append_output(tokens)
    into.record_row(Row(one, tree.verified, tree), RowResult(tokens, path, ranks, **fields), taken, now=6.0)  # type: ignore[arg-type]


def cells(of: StepRecorder) -> dict[tuple[int, str], dict[int, int]]:
    """Return the acceptance counts as {(depth, parent): {rank: count}}."""
    return {
        (cell.depth, cell.parent): {rank: count for rank, count in enumerate(cell.ranks) if count}
        for cell in of.statistics.acceptance_cells(1000)
    }


def test_ranks_are_counted_by_depth_and_parent() -> None:
    into, one = recorder(), request()
    walk(into, one, WIDE, [5, 6, 7, 8], ranks=[1, 0, 0, -1], path=[2, 4, 6])
    assert cells(into) == {(1, "main"): {1: 1}, (2, "sibling"): {0: 1}, (3, "sibling"): {0: 1}}
    walk(into, one, WIDE, [5, 6], ranks=[0, MAX_RANKS, -1, -1], path=[1, -1, -1])
    assert cells(into)[1, "main"] == {0: 1, 1: 1}
    assert cells(into)[2, "main"] == {MAX_RANKS: 1}


def test_first_tokens_are_counted_by_the_context_of_the_step() -> None:
    """A plain row whose first token was ranked, for a shadow draft, counts as a verified one."""
    into, one = recorder(), request()
    for context, rank in ((0, 0), (0, 1), (2, 0)):
        into.context = context
        walk(into, one, CHAIN, [5], ranks=[rank, -1], path=[-1, -1])
    walk(into, one, tree_of(TreeShape.chain(0), 2), [6], ranks=[0], path=[], ranked_NK=[[6, 8], [9, 1], [-1, -1]])
    walk(into, one, PLAIN, [7], ranks=[-1], path=[])
    found = {cell.context: (cell.hits, cell.total) for cell in into.statistics.context_cells(1000)}
    assert found == {0: (1, 2), 2: (2, 2)}


def test_depths_that_no_report_has_are_not_counted() -> None:
    into, one = recorder(), request(max_tokens=40)
    chain = tree_of(TreeShape.chain(MAX_DEPTH + 2))
    walk(into, one, chain, [5] * (MAX_DEPTH + 3), ranks=[0] * (MAX_DEPTH + 2) + [-1], path=[*range(1, MAX_DEPTH + 3)])
    assert {depth for depth, _ in cells(into)} == {*range(1, MAX_DEPTH + 1)}


def test_tokens_dropped_by_a_stop_are_not_counted() -> None:
    into, one = recorder(), request(stop_token_ids=(6,))
    walk(into, one, CHAIN, [6, 7, 8], ranks=[0, 0, -1], path=[1, 2])
    assert cells(into) == {(1, "main"): {0: 1}}
    assert into.statistics.traffic("other").output_tokens == 1


def test_tokens_of_a_step_share_its_time() -> None:
    into, one = recorder(), request()
    walk(into, one, PLAIN, [5], ranks=[-1], path=[])
    one.last_emit_seconds = 5.1
    walk(into, one, CHAIN, [5, 6, 7], ranks=[0, 0, -1], path=[1, 2])
    statistics = into.statistics
    assert sum(statistics.ttft.counts) == 1
    assert sum(statistics.itl.counts) == 3
    assert statistics.itl.sum == pytest.approx(0.9)


SHADOWED = tree_of(TreeShape.chain(1), 4)
"""Tree with one verified node and three shadow nodes.

The draft ranked candidates after the root and nodes 1 to 3.
"""
RANKED = [[1, 9], [2, 9], [3, 9], [8, 4], [-1, -1]]


def test_shadow_nodes_are_scored_without_verification_when_their_tokens_are_known() -> None:
    into, one = recorder(), request(prompt=(0, 0))
    one.cached = 1
    walk(into, one, SHADOWED, [1, 2], ranks=[0, 0], path=[1], ranked_NK=RANKED)
    assert cells(into) == {(1, "main"): {0: 1}, (2, "main"): {0: 1}}
    walk(into, one, PLAIN, [3], ranks=[-1], path=[])
    assert (3, "main") not in cells(into), "the path's end is not known yet"
    walk(into, one, PLAIN, [4], ranks=[-1], path=[])
    assert cells(into) == {(d, "main"): {r: 1} for d, r in ((1, 0), (2, 0), (3, 0), (4, 1))}
    walk(into, one, PLAIN, [5], ranks=[-1], path=[])
    assert sum(sum(ranks.values()) for ranks in cells(into).values()) == 4, "scored once"


def test_shadow_nodes_of_an_ended_request_are_dropped() -> None:
    into, one = recorder(), request(prompt=(0, 0))
    one.cached = 1
    walk(into, one, SHADOWED, [1, 2], ranks=[0, 0], path=[1], ranked_NK=RANKED)
    one.finish = "abort"
    into.record_end(one, 7.0)
    again = request(prompt=(0, 0))
    again.tokens += [1, 2, 3]
    walk(into, again, PLAIN, [4], ranks=[-1], path=[])
    assert set(cells(into)) == {(1, "main"), (2, "main")}


def test_queue_time_is_recorded_once_despite_a_preemption_before_the_first_token() -> None:
    into, one = recorder(), request()
    into.record_admission(one, 5.2)
    one.forget_cache()
    into.record_admission(one, 9.0)
    assert sum(into.statistics.queue.counts) == 1
    assert into.statistics.queue.sum == pytest.approx(0.2)


@pytest.mark.parametrize(("finish", "counted"), [("stop", 1), ("length", 1), ("abort", 0), ("error", 0)])
def test_only_completed_requests_count_as_finished(finish: str, counted: int) -> None:
    into, one = recorder(), request()
    into.record_arrival(one)
    one.accepted, one.drafts, one.finish = 7, 3, finish  # type: ignore[assignment]
    into.record_end(one, 6.0)
    traffic = into.statistics.traffic("other")
    assert (traffic.arrivals, traffic.prompt_tokens, traffic.finished) == (1, 3, counted)
    assert [(cell.n, cell.a, cell.d) for cell in into.statistics.request_cells()] == [(1, 7, 3)] * counted
    assert sum(into.statistics.e2e.counts) == counted


def test_latency_and_tokens_per_step_are_counted_by_task() -> None:
    into = recorder()
    for task, steps in (("code", 2), ("chat", 1)):
        one = Request.of(structs.replace(request().submit, task=task), (), arrived_seconds=5.0)
        walk(into, one, PLAIN, [5], ranks=[-1], path=[])
        for _ in range(steps):
            walk(into, one, CHAIN, [5, 6, 7], ranks=[0, 0, -1], path=[1, 2])
    cells = {cell.task: cell for cell in into.statistics.task_cells()}
    assert {task: (cell.decode_steps, cell.decode_tokens) for task, cell in cells.items()} == {
        "code": (3, 7),
        "chat": (2, 4),
    }
    assert {task: (sum(cell.ttft.counts), sum(cell.itl.counts)) for task, cell in cells.items()} == {
        "code": (1, 6),
        "chat": (1, 3),
    }
    assert cells["code"].ttft.sum == pytest.approx(1.0)
    assert sum(into.statistics.ttft.counts) == 2
    assert sum(into.statistics.itl.counts) == 9


MOMENT = Report(
    **asdict(identity(9)),
    draft=DraftState(method="eagle3", hash="d"),
    clock_seconds=12.5,
    plan=PlanState(uid="u", version=4),
)


def size_of_kind(kind: int) -> StepSize:
    return StepSize(
        sequences=13, verify_tokens=1 << kind % 10, kv_tokens=123_457, draft_passes=kind // 10, prefill_tokens=0
    )


def busy(tasks: int, depth: int, kinds: int) -> Statistics:
    """Return statistics with this many tasks, depths and kinds of steps. The first ones have the highest counts."""
    statistics = Statistics()
    for task in range(tasks):
        for sampled in (False, True):
            category = AcceptanceCategory(f"a-task-whose-name-is-long-{task}", sampled, "0123456789abcdef")
            statistics.traffic(category.task).arrivals += 1
            for level in range(1, depth + 1):
                for main in (True, False):
                    for rank in range(MAX_RANKS + 1):
                        statistics.ranks(category).levels(level, main=main)[level - 1][rank] += 1_000_000 >> level
    for kind in range(kinds):
        for _ in range(2 if kind < 3 else 1):
            statistics.costs.add(kind % 3, size_of_kind(kind), 7, 0.0123456789)
    return statistics


def test_the_operator_reads_what_a_worker_reports_and_what_happened_between() -> None:
    statistics = busy(2, 6, 40)
    statistics.record_draft(statistics.traffic("other"), 4, 2)
    statistics.running_request_seconds, statistics.waiting_request_seconds = 7.0, 8.0
    before = build_report(MOMENT, statistics)
    statistics.record_draft(statistics.traffic("other"), 5, 3)
    after = build_report(MOMENT.model_copy(update={"clock_seconds": 14.5}), statistics)
    assert read_report(after.model_dump_json().encode()) == after
    assert (after.running_request_seconds, after.waiting_request_seconds) == (7, 8)
    delta = difference(before, after, at=100, buckets=Buckets())
    assert (delta.drafts, delta.draft_tokens, delta.accepted_tokens, delta.plain_steps) == (1, 5, 3, 0)
    assert set(delta.traffic) == {cell.task for cell in after.traffic}


@pytest.mark.parametrize(("tasks", "depth", "kinds"), [(2, 6, 30), (MAX_TASKS, 16, 64), (MAX_TASKS + 4, 16, 200)])
def test_a_report_is_never_larger_than_the_operator_reads(tasks: int, depth: int, kinds: int) -> None:
    report = build_report(MOMENT, busy(tasks, depth, kinds))
    assert len(report.model_dump_json().encode()) <= MAX_REPORT_BYTES
    assert len(report.tasks) <= MAX_TASKS + 1
    assert len(report.steps) >= 8, "a planner can do nothing without the cost of steps"
    assert {cell.depth for cell in report.acceptance} >= set(range(1, 5))


def test_nothing_is_left_out_of_a_small_report() -> None:
    report = build_report(MOMENT, busy(2, 6, 30))
    assert (len(report.acceptance), len(report.steps)) == (2 * 2 * 6 * 2, 30)


def test_the_cells_that_ran_least_recently_are_left_out() -> None:
    """A shape that begins to run is timed at once, however many steps of others there were before."""
    statistics = busy(1, 1, 200)
    statistics.costs.add(0, size_of_kind(0), 7, 0.01)
    report = build_report(MOMENT, statistics)
    assert len(report.steps) <= MAX_STEP_CELLS
    counts = {(c.tokens_bucket, c.draft_passes, c.prefill, c.context_bucket): c.count for c in report.steps}
    assert counts[size_of_kind(199).cell_key(199 % 3)] == 1
    assert counts[size_of_kind(0).cell_key(0)] == 3, "an old kind that runs again"
    assert size_of_kind(1).cell_key(1) not in counts


def test_cells_of_drafts_that_are_gone_are_left_out_first() -> None:
    statistics = busy(MAX_TASKS, 16, 0)
    statistics.record_rank(AcceptanceCategory(OTHER_TASK, False, "d"), 1, main=True, rank=0)
    report = build_report(MOMENT, statistics)
    assert len(report.acceptance) < MAX_TASKS * 2 * 16 * 2
    assert [(cell.draft, cell.total) for cell in report.acceptance[:1]] == [("d", 1)]
