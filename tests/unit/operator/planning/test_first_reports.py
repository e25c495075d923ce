"""First reports: what a worker knows of costs is taken from there where nobody has told yet, and from nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdecode_operator.decision.learn import learn_first_reports
from specdecode_operator.decision.plan import _per_token
from specdecode_operator.planning.acceptance import lacking
from specdecode_operator.planning.estimates import TUNING, buckets_for
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.telemetry.counters import Moments
from specdecode_worker.contract import Buckets, Plan, Report, SyntheticKnobs, TreeShape
from support.operators.fleet import SimulatedWorker, Truth, linear_time, loop_over

BUCKETS = Buckets()
MOST_STEPS = 2 * TUNING.min_samples


def first_report(*depths: int, steps: int = 40, **fields: object) -> Report:
    """Of a worker that has run chains of these depths."""
    worker = SimulatedWorker(Truth(), plan=Plan(initial=TreeShape.chain(3)))
    for depth in depths:
        for _ in range(steps):
            worker._step(depth)
    return worker.report().model_copy(update=fields)


def of_draft(report: Report) -> LearnedState:
    return LearnedState(uid="u", draft=report.draft.hash)


def test_kinds_that_nobody_told_of_are_taken_at_little_weight() -> None:
    report = first_report(0, 3)
    learned = learn_first_reports(of_draft(report), [report], BUCKETS, now=50.0)
    assert {cell.draft_passes for cell in learned.costs} == {0, 3}
    for cell in learned.costs:
        count, seconds = cell.values[:2]
        assert count == pytest.approx(MOST_STEPS)
        assert seconds / count == pytest.approx(linear_time(1, cell.draft_passes, Truth().context), rel=0.1)
        assert (cell.at, cell.polls) == (50.0, 1)


def test_acceptance_of_the_evaluation_counts_for_few_drafts() -> None:
    report = first_report(0, 3)
    report = report.model_copy(update={"draft": report.draft.model_copy(update={"agreement": (0.6, 0.5)})})
    learned = learn_first_reports(of_draft(report), [report], BUCKETS, now=50.0)
    assert [(cell.depth, cell.total, cell.hits / cell.total) for cell in learned.acceptance] == [
        (1, pytest.approx(MOST_STEPS), pytest.approx(0.6)),
        (2, pytest.approx(0.6 * MOST_STEPS), pytest.approx(0.5)),
    ]
    assert lacking(learned) is not None, "it is no measurement under traffic"
    known = learned.model_copy(update={"acceptance": learned.acceptance[:1]})
    assert learn_first_reports(known, [report], BUCKETS, now=60.0).acceptance == known.acceptance
    other = report.model_copy(update={"draft": report.draft.model_copy(update={"hash": "another"})})
    assert learn_first_reports(of_draft(report), [other], BUCKETS, now=50.0).acceptance == ()


def test_what_made_up_text_emits_is_no_pace() -> None:
    """Plain steps emit what they always do."""
    report = first_report(0, 3)
    plain, drafted = learn_first_reports(of_draft(report), [report], BUCKETS, now=50.0).costs
    assert Moments(plain.values).emitted == pytest.approx(plain.values[0])
    assert (Moments(drafted.values).emitted, drafted.made_up) == (0, pytest.approx(MOST_STEPS))


def test_the_pace_of_a_shape_is_told_by_real_answers_alone() -> None:
    truth = Truth(chances=[0.6] * 5)
    loop = loop_over(replace(truth, chances=[1.0] * 5), explore=0.0)
    loop.worker.plan = Plan(initial=TreeShape.chain(3), buckets=buckets_for(16))
    for _ in range(40):
        loop.worker._step(3)  # made-up text, all of it accepted
    loop.worker.truth = truth
    loop.polls(2)
    (cell,) = (cell for cell in loop.memory.learned.costs if cell.draft_passes == 3)
    assert 0 < cell.made_up < MOST_STEPS
    tokens = 1 + 0.6 + 0.6**2 + 0.6**3
    pace = _per_token([cell], TreeShape.chain(3), "eagle3", 0, 1)
    assert pace == pytest.approx(linear_time(1, 3, truth.context) / tokens, rel=0.1)


def test_several_workers_are_told_of_together() -> None:
    reports = [first_report(0, steps=8), first_report(0, steps=8)]
    (cell,) = learn_first_reports(of_draft(reports[0]), reports, BUCKETS, now=0).costs
    assert cell.values[0] == 16


def test_a_report_with_knobs_on_is_believed() -> None:
    report = first_report(0, 3, synthetic=SyntheticKnobs(acceptance=(0.5,)))
    assert len(learn_first_reports(of_draft(report), [report], BUCKETS, now=0).costs) == 2


def test_what_is_known_stays() -> None:
    report = first_report(0, 3)
    learned = learn_first_reports(of_draft(report), [first_report(0)], BUCKETS, now=1)
    again = learn_first_reports(learned, [report], BUCKETS, now=2)
    assert [(cell.draft_passes, cell.at) for cell in again.costs] == [(0, 1), (3, 2)]
    assert learn_first_reports(again, [report], BUCKETS, now=3) is again


@pytest.mark.parametrize(
    "report",
    [
        first_report(0, steps=3),
        first_report(0).model_copy(update={"plan": first_report().plan.model_copy(update={"buckets": None})}),
        first_report(),
    ],
    ids=["too-few-steps", "other-buckets", "nothing-ran"],
)
def test_what_says_nothing_is_left(report: Report) -> None:
    learned = of_draft(report)
    assert learn_first_reports(learned, [report], BUCKETS, now=0) is learned


def test_of_another_draft_only_plain_steps_count() -> None:
    report = first_report(0, 3)
    learned = learn_first_reports(LearnedState(uid="u", draft="another"), [report], BUCKETS, now=0)
    assert {cell.draft_passes for cell in learned.costs} == {0}


def test_the_loop_meets_a_worker_once() -> None:
    loop = loop_over(Truth(chances=[0.2] * 5), explore=0.0)
    loop.worker.plan = Plan(initial=TreeShape.chain(3), buckets=buckets_for(16))
    for depth in (0, 1, 5):
        for _ in range(8):
            loop.worker._step(depth)
    loop.poll()
    assert {cell.draft_passes for cell in loop.memory.learned.costs} == {0, 1, 3, 5}
    loop.memory = replace(loop.memory, learned=loop.memory.learned.model_copy(update={"costs": ()}))
    loop.poll()
    assert {cell.draft_passes for cell in loop.memory.learned.costs} == {3}
