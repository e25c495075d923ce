"""The decision history and the realised gain of its changes."""

from __future__ import annotations

import pytest

from specdecode_operator.api.v1alpha1 import Decision, SpeculationStatus, Status
from specdecode_operator.decision.plan import FOLLOWED, HISTORY, ROWS, realised, recorded, records
from specdecode_operator.planning.estimates import buckets_for
from specdecode_operator.planning.search import Change
from specdecode_operator.state.learned import GainMeasurement, LearnedState, LoadState, RowState, Session, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Delta, Moments
from specdecode_worker.contract import Method, Plan, PlanRow, TreeShape
from support.operators.estimates import moments
from support.operators.fleet import Truth, loop_over, per_token


@pytest.mark.parametrize("chances", [[0.02] * 5, [0.98] * 5], ids=["stopped", "deepened"])
def test_the_realised_gain_equals_that_of_the_simulated_step_times(chances: list[float]) -> None:
    truth = Truth(chances=chances)
    loop = loop_over(truth, explore=0.1)
    loop.polls(60)
    decision = loop.memory.learned.history[-1]
    before, after = (TreeShape.parse(text).depth for text in (decision.before, decision.after))
    assert before == 3
    expected = 100 * (per_token(truth, before) / per_token(truth, after) - 1)
    assert decision.realised_gain_percent == pytest.approx(expected, abs=max(4.0, 0.12 * expected))


def test_a_realised_gain_needs_enough_drafts_and_its_measurement_survives_a_restart() -> None:
    loop = loop_over(Truth(chances=[0.02] * 5))
    while not (loop.decision and loop.decision.changes):
        loop.poll()
    loop.poll(2.5)
    assert loop.memory.learned.history[0].realised_gain_percent is None
    loop.restart_operator()
    assert loop.memory.learned.following[0].drafts < 500
    loop.polls(10)
    assert loop.memory.learned.history[0].realised_gain_percent is not None
    assert not loop.memory.learned.following


def plan_of(depth: int) -> Plan:
    rows = tuple(PlanRow(concurrency=c, context=x, shape=TreeShape.chain(depth)) for c in range(6) for x in range(3))
    return Plan(version=1, rows=rows, initial=TreeShape.chain(3))


def decision(**fields: object) -> Decision:
    words = {"time": "t", "load": "l", "before": "chain:3", "after": "chain:5", "reason": "r", **fields}
    return Decision.model_validate(words)


def test_gain_measurements_are_few_and_near_the_present_load() -> None:
    learned = LearnedState(load=LoadState(sequences=16, context_bucket=2))
    for index in range(6):
        learned = learned.model_copy(update={"plan": plan_of(index + 1)})
        moved = decision(time=f"{index}", before=f"chain:{index}" if index else "none", after=f"chain:{index + 1}")
        learned = recorded(learned, (moved,), plan_of(index))
    assert len(learned.following) == FOLLOWED
    assert len(learned.following[0].rows) == ROWS
    assert learned.following[0].rows[0] == (4, 2, "other")


def following(row: int = 0) -> GainMeasurement:
    """Return the measurement of a change from chain:3 to chain:5."""
    return GainMeasurement(time="t", before="chain:3", after="chain:5", rows=((row, 0, "other"),))


def steps_of(
    passes: int, *, nodes: int, seconds: float, emitted: int, sequences: float = 1.0
) -> tuple[CellKey, Moments]:
    """Return 1000 equal steps. ``emitted`` is of one sequence."""
    x = (1.0, sequences, sequences * (nodes + 1), 100 * sequences, float(passes), 0.0)
    return CellKey(8, passes, False, 0), moments(x, seconds, 1000, spread=0, tokens=emitted)


def measured(
    passes: tuple[int, int] = (3, 5),
    *,
    row: int = 0,
    seconds: float = 0.24,
    sequences: float = 1.0,
    method: Method = "eagle3",
) -> LearnedState:
    """Return what is known after the change. Steps of chains of 3 took 0.2 s for 2 tokens, those of 5 emit 3."""
    old_key, old = steps_of(passes[0], nodes=3, seconds=0.2, emitted=2, sequences=sequences)
    key, new = steps_of(passes[1], nodes=5, seconds=seconds, emitted=3, sequences=sequences)
    costs = (StepTimeCell(**old_key._asdict(), values=old.values, at=0),)
    learned = LearnedState(plan=plan_of(5), following=(following(row),), history=(decision(),), costs=costs)
    return realised(learned, Delta(steps={key: new}), Plan().buckets, method)


def test_the_measurement_ends_when_its_decision_leaves_the_history() -> None:
    learned = LearnedState(plan=plan_of(5), following=(following(),), history=(decision(time="later"),))
    assert not realised(learned, Delta(), Plan().buckets, "eagle3").following


@pytest.mark.parametrize(("method", "passes", "is_measured"), [("peagle", (1, 1), True), ("eagle3", (3, 5), True),
                                                               ("eagle3", (1, 1), False)])  # fmt: skip
def test_a_draft_of_one_pass_is_measured_at_every_depth(
    method: Method, passes: tuple[int, int], is_measured: bool
) -> None:
    after = measured(passes, method=method)
    assert after.history[0].realised_gain_percent == (25.0 if is_measured else None)


def test_steps_with_a_few_sequences_more_than_an_edge_measure_the_row_below() -> None:
    """A mean of 2.04 comes from many steps with two sequences and a few with three."""
    rows = (1, 2)  # of 2 sequences, and of 3 to 4
    gains = [measured(row=row, sequences=2.04).history[0].realised_gain_percent for row in rows]
    assert gains == [25.0, None]


def test_steps_without_a_time_measure_no_gain() -> None:
    after = measured(seconds=0.0)
    assert (after.following, after.history[0].realised_gain_percent) == ((following(),), None)


def test_only_changes_of_rows_start_a_gain_measurement() -> None:
    learned = recorded(LearnedState(plan=plan_of(5)), (decision(kind="Steering"),), plan_of(3))
    assert not learned.following
    assert len(learned.history) == 1


def test_history_is_bounded_and_newest_first() -> None:
    learned = LearnedState()
    for index in range(HISTORY + 3):
        learned = recorded(learned, (decision(time=f"{index}"),), None)
    assert [entry.time for entry in learned.history] == [f"{index}" for index in range(HISTORY + 2, 2, -1)]


def test_a_change_of_mode_is_recorded_in_the_history() -> None:
    loop = loop_over(speculation={"mode": "Static"})
    loop.polls(2)
    loop.deployment = loop_over(speculation={"mode": "Advisory"}).deployment
    (change,) = loop.poll().changes
    assert (change.kind, change.before, change.after) == ("Steering", "mode Static", "mode Advisory")


def test_after_a_loss_of_state_the_history_is_read_from_status() -> None:
    loop = loop_over()
    loop.deployment = loop_over().deployment
    status = Status(speculation=SpeculationStatus(history=(decision(),)))
    object.__setattr__(loop.deployment, "status", status)
    loop.memory = Session(stored=False)
    assert loop.poll().shown.history == (decision(),)


def test_a_change_of_replicas_is_recorded_in_the_history() -> None:
    truth = Truth(sequences=16, waiting=40.0)
    loop = loop_over(truth, scaling={"owner": "Operator", "maxReplicas": 3})
    decision = loop.polls(6)
    (change,) = [entry for entry in decision.shown.history if entry.kind == "Replicas"]
    assert (change.before, change.after) == ("1", "3")
    assert "demand" in change.reason
    spec = loop.deployment.spec.scaling
    object.__setattr__(spec, "max_replicas", 2)
    bounded = loop.poll(0.0).shown.history[0]
    assert (bounded.before, bounded.after) == ("3", "2")
    assert bounded.reason == "spec.scaling allows 1 to 2 workers", "no worker has a new reading"


def test_advisory_changes_no_child() -> None:
    """The same manifests mean the same resourceVersion: server-side apply of equal text changes nothing."""
    loop = loop_over(Truth(chances=[0.02] * 5), speculation={"mode": "Advisory"})
    first = loop.polls(3)
    last = loop.polls(20)
    assert last.children == first.children
    assert not last.pushes
    assert last.shown.recommended == "none"


# --- records of changes of a plan -----------------------------------------------------------------------------------


PRESENT = LearnedState(load=LoadState(sequences=1.9, context_bucket=0, task="other", at=1))
BUCKETS = buckets_for(8)


def moved(concurrency: int, depth: int, reason: str, *, follows: bool = False) -> Change:
    row = RowState(concurrency=concurrency, context=0, task="other", depth=depth, since=1)
    before = TreeShape.chain(3)
    return Change(row=row, before=before, gain=0.1, cause="gain", reason=reason, follows=follows)


def test_a_load_that_was_decided_leads_those_that_follow_it() -> None:
    changes = [moved(0, 2, "at one"), moved(1, 2, "at one", follows=True), moved(2, 2, "at one", follows=True)]
    (record,) = records(changes, PRESENT, BUCKETS, 5.0)
    assert record.load == "concurrency 1 or 2 or 3-4, context <=1024, task other"
    assert record.reason == "at one; concurrency 2 or 3-4, context <=1024 follows"


def test_the_present_load_leads_those_that_were_decided_like_it() -> None:
    (record,) = records([moved(0, 2, "at one"), moved(1, 2, "at two")], PRESENT, BUCKETS, 5.0)
    assert record.load == "concurrency 2 or 1, context <=1024, task other"
    assert record.reason == "at two"


def test_the_record_of_the_present_load_is_the_latest() -> None:
    made = records([moved(1, 2, "at two"), moved(0, 1, "at one"), moved(3, 0, "above")], PRESENT, BUCKETS, 5.0)
    assert [record.reason for record in made] == ["at one", "above", "at two"]
