"""Sessions packed in the process."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.state import session as session_module
from specdecode_operator.state.learned import LearnedState, TemplateState
from specdecode_operator.state.session import Baseline, PackedSession
from support.operators.crowd import Crowd
from support.operators.fleet import SimulatedWorker, Truth, loop_over


def test_a_packed_session_is_small_and_unpacks_as_it_was() -> None:
    loop = loop_over()
    loop.polls(8)
    crowd = Crowd()
    template = TemplateState(spec_hash="h", template={"x": "y" * 19_000}, image="i")
    learned = loop.memory.learned.model_copy(update={"template": template, "parked": (crowd.parked("d2"),)})
    session = replace(loop.memory, learned=learned, published_at=7.0, stored=False)
    packed = PackedSession.of(session)
    assert packed.session == session
    assert len(packed.learned) < len(learned.model_dump_json()) / 3


def test_unchanged_parked_estimates_are_not_packed_again() -> None:
    session = replace(loop_over().memory, learned=LearnedState(uid="u", parked=(Crowd().parked("d2"),)))
    first = PackedSession.of(session)
    later = replace(first.session, published_at=9.0)
    assert PackedSession.of(later, first).parked is first.parked
    changed = later.learned.model_copy(update={"parked": (Crowd(2).parked("d2"),)})
    assert PackedSession.of(replace(later, learned=changed), first).session.learned == changed


def test_reports_are_equal_after_they_left_the_cache() -> None:
    report = SimulatedWorker(Truth()).report()
    reports = [report.model_copy(update={"clock_seconds": float(number)}) for number in range(100)]
    baselines = [Baseline.of(report, "tag") for report in reports]
    assert [baseline.report for baseline in baselines] == reports
    assert baselines[-1].report is baselines[-1].report, "a decision reads it several times"
    assert baselines[0].at(7.0).report.clock_seconds == 7.0
    assert len(session_module._reports._reports) <= 24
