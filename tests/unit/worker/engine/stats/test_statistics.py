"""Counters of a worker: they only rise, have at most eight named tasks, and follow the contract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_RANKS, MAX_TASKS, OTHER_TASK, LatencyHistogram
from specdecode_worker.engine.stats import AcceptanceCategory, Histogram, Statistics

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


def test_ranks_are_counted_in_their_cell() -> None:
    statistics = Statistics()
    for rank in (0, 0, 3, MAX_RANKS):
        statistics.record_rank(AcceptanceCategory("a", True, "d"), 2, main=True, rank=rank)
    statistics.record_rank(AcceptanceCategory("a", True, "d"), 2, main=False, rank=1)
    statistics.record_rank(AcceptanceCategory("a", False, "d"), 2, main=True, rank=7)
    ranks_by_cell = {(c.sampled, c.parent): c.ranks for c in statistics.acceptance_cells(1000)}
    assert ranks_by_cell == {
        (True, "main"): (2, 0, 0, 1, 0, 0, 0, 0, 1),
        (True, "sibling"): (0, 1, 0, 0, 0, 0, 0, 0, 0),
        (False, "main"): (0, 0, 0, 0, 0, 0, 0, 1, 0),
    }
    assert {(c.draft, c.task, c.depth) for c in statistics.acceptance_cells(1000)} == {("d", "a", 2)}


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


def test_each_token_of_a_step_is_counted() -> None:
    histogram = Histogram.of("ttit")
    histogram.add(0.0042, 3)
    assert sum(histogram.counts) == 3
    assert histogram.sum == pytest.approx(3 * 0.0042)
    assert histogram.counts[histogram.edges.index(0.005)] == 3
