"""Rollout of a candidate draft: every event by literals, through the whole decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.api.draft import SpecDecodeDraft, TrialRecord
from specdecode_operator.drafts.crossover import CrossoverTuning
from specdecode_operator.rollout.phases import count_pairs, gain_of
from specdecode_operator.state.learned import (
    AcceptanceCell,
    RowState,
    StepTimeCell,
    parse_training,
    render_training,
)
from specdecode_worker.contract import Artifact, TrialState
from support.operators.canary import (
    NEW,
    OLD,
    Canary,
    Pod,
    canary_with,
    offer_another,
    pair,
    promoted,
    promoting,
    trying,
)
from support.operators.fleet import deployment_with, with_pause

TRIAL = TrialRecord(block_requests=32, min_gain=0.02)


def with_candidate_of_unknown_hash() -> Canary:
    canary = Canary(deployment_with(replicas=2))
    canary.tick()
    canary.offer({"uri": "file:///new"})
    canary.ticks(2)
    return canary


def outcomes(canary: Canary) -> list[tuple[str, str]]:
    return [(entry.outcome, entry.hash) for entry in canary.record.lineage]


def test_a_candidate_is_tried_by_one_ready_worker_and_the_plan_rises() -> None:
    canary = canary_with()
    canary.pods[0].ready = False
    before = canary.session.learned.plan
    decision = canary.tick()
    assert decision.plan.version == before.version + 1
    trial = decision.plan.assignment.trial
    assert (trial.pod, trial.candidate) == ("pod-b", Artifact(uri="file:///new", hash=NEW))
    assert (decision.plan.assignment.stable, decision.plan.assignment.spec_draft) == (None, "embedded://d")
    (change,) = [change for change in decision.changes if change.kind == "Draft"]
    assert (change.before, change.after) == ("Serving with the draft of the spec", f"Canary {NEW}")


def test_a_faster_candidate_is_promoted_and_the_others_follow() -> None:
    canary = trying()
    template = canary.session.learned.template
    canary.finish_pairs(60, 0.10)
    assert canary.phase == "Promoting"
    assert canary.decision.plan.draft == NEW
    (change,) = [change for change in canary.decision.changes if change.kind == "Draft"]
    assert change.realised_gain_percent == pytest.approx(10.0)
    assert "pairs, gain +10.0 %" in change.reason
    canary.until("Cooldown")
    assert [pod.draft for pod in canary.pods] == [NEW, NEW]
    assert outcomes(canary) == [("Promoted", NEW)]
    assert canary.session.learned.template == template, "no pod is replaced"
    canary.tick(86_000)
    assert canary.phase == "Cooldown", "distillation.trigger.cooldown"
    canary.tick(500)
    assert canary.phase == "Serving"
    canary.ticks(3)
    assert canary.phase == "Serving", "a candidate is tried once"
    assert canary.record.current == NEW


@pytest.mark.parametrize(("gain", "outcome"), [(-0.08, "RolledBack"), (0.0, "Undecided")])
def test_a_candidate_that_is_not_better_is_rolled_back(gain: float, outcome: str) -> None:
    canary = trying()
    canary.finish_pairs(CrossoverTuning().max_pairs, gain)
    assert canary.phase == "RollingBack"
    canary.until("Cooldown")
    assert outcomes(canary) == [(outcome, NEW)]
    assert (canary.record.current, [pod.draft for pod in canary.pods]) == ("", [OLD, OLD])


def test_pairs_are_counted_once_by_index() -> None:
    once = count_pairs(TRIAL, [pair(1, 0.1), pair(0, 0.2)], ["other"])
    again = count_pairs(once, [pair(0, 0.2), pair(1, 0.1), pair(2, 0.3)], ["other"])
    assert [round(one.total, 4) for one in again.pairs] == [0.1823, 0.0953, 0.2624]
    assert again.next_pair == 3


def test_unusable_pairs_are_passed_over() -> None:
    empty = pair(0, 0.1).model_copy(update={"candidate": ()})
    tiny = pair(1, 0.1)
    tiny = tiny.model_copy(update={"incumbent": (tiny.incumbent[0].model_copy(update={"sequence_seconds": 1e-320}),)})
    huge = pair(2, 0.1)
    huge = huge.model_copy(update={"incumbent": (huge.incumbent[0].model_copy(update={"tokens": 1e308}),)})
    counted = count_pairs(TRIAL, [empty, tiny, huge, pair(3, 0.1)], ["other"])
    assert counted.next_pair == 4
    assert counted.pairs[-1].total == pytest.approx(0.0953, abs=1e-4)


def test_the_bounds_of_the_gain_enclose_its_mean() -> None:
    trial = count_pairs(TRIAL, [pair(index, 0.1 + 0.02 * (index % 3 - 1)) for index in range(40)], ["other"])
    gain = gain_of(trial)
    assert 0.05 < gain.least < gain.mean < gain.most < 0.15
    assert gain.mean == pytest.approx(0.1, abs=0.005)


def test_a_few_pairs_have_no_bounds() -> None:
    gain = gain_of(count_pairs(TRIAL, [pair(0, 0.1), pair(1, 0.1)], ["other"]))
    assert (gain.least, gain.most) == (None, None)
    assert str(gain) == "+10.0 %, too few pairs for bounds"


def test_a_worker_that_cannot_load_the_candidate_ends_its_trial() -> None:
    canary = trying()
    trial = canary.tries.trial
    canary.tries.trial = TrialState(id=trial.id, state="Failed", problem="midlayer.weight has NaN")
    canary.tick()
    assert canary.phase == "RollingBack"
    assert outcomes(canary) == [("Refused", NEW)]
    assert "midlayer.weight has NaN" in canary.record.last_verdict
    canary.until("Cooldown")
    canary.ticks(3)
    assert canary.phase == "Cooldown", "the same candidate is not tried again"


def test_a_report_about_another_trial_says_nothing() -> None:
    canary = trying()
    canary.tries.trial = TrialState(id="another", state="Failed", problem="old")
    canary.tick(push=False)
    assert canary.phase == "Canary"


def test_a_lost_pod_is_replaced_and_the_third_loss_rolls_back() -> None:
    canary = trying()
    canary.finish_pairs(2, 0.1)
    for number in (1, 2, 3):
        gone = canary.tries
        canary.pods = [pod for pod in canary.pods if pod is not gone] + [Pod(f"pod-{number}", f"1{number}")]
        canary.tick()
        assert canary.record.canary_losses == (number if number < 3 else 0)
        if number < 3:
            assert canary.record.trial.first_pair == 2
            assert canary.tries.name != gone.name
    assert canary.phase == "RollingBack"
    assert outcomes(canary) == [("Failed", NEW)]


def test_a_restarted_worker_counts_as_lost_and_its_next_pairs_have_another_name() -> None:
    canary = trying()
    first = canary.record.trial
    canary.finish_pairs(2, 0.1)
    canary.tries.boot = "boot-2"
    canary.tick()
    assert canary.record.canary_losses == 1
    assert canary.tries.name == "pod-a"
    second = canary.record.trial
    assert (first.id != second.id, second.id.startswith(f"{NEW}-"), second.first_pair) == (True, True, 2)
    canary.ticks(3)
    assert canary.record.canary_losses == 1


def test_a_reject_does_not_count_as_converged_before_the_canary_has_ended() -> None:
    canary = trying()
    canary.command("reject")
    canary.tick(push=False)
    assert canary.phase == "RollingBack"
    canary.tick(push=False)
    assert canary.phase == "RollingBack", "the worker still reports its trial on the old plan"
    canary.push()
    canary.tick()
    assert canary.phase == "Cooldown"
    assert outcomes(canary) == [("Rejected", NEW)]


def test_a_worker_that_refuses_a_promotion_takes_it_back() -> None:
    canary = promoting()
    canary.pods[1].obeys = False
    canary.pods[1].draft, canary.pods[1].swap_problem = OLD, "the folder vanished"
    canary.tick()
    assert canary.phase == "Promoting", "the problem may be older than the assignment"
    canary.tick(10)
    assert canary.phase == "RollingBack"
    assert canary.decision.plan.draft == OLD
    assert outcomes(canary) == [("Refused", NEW)]
    assert canary.record.candidate_outcomes == {"Promoted": 1, "Refused": 1}
    canary.until("Cooldown")
    assert canary.record.current == ""


def test_a_rollback_does_not_count_as_converged_before_its_plan_is_pushed() -> None:
    canary = promoting()
    for pod in canary.pods:
        pod.obeys, pod.draft, pod.trial = False, OLD, None
    canary.tick()
    assert canary.phase == "Promoting"
    canary.carry_out("rollback")
    assert canary.phase == "RollingBack", "the workers may begin to load the new draft at any moment"
    canary.tick()
    assert canary.phase == "Cooldown"


def test_a_promotion_that_takes_too_long_is_taken_back() -> None:
    canary = promoting()
    canary.pods[1].obeys, canary.pods[1].draft = False, OLD
    canary.tick(1900)
    assert canary.phase == "RollingBack"
    assert outcomes(canary)[0] == ("Expired", NEW)


def test_a_promoted_draft_that_new_workers_cannot_load_gives_way_to_that_of_the_spec() -> None:
    canary = promoted()
    for pod in canary.pods:
        pod.obeys, pod.draft, pod.swap_problem = False, "", "the folder is gone"
    canary.tick(20)
    assert canary.record.current == ""
    assert outcomes(canary)[0] == ("Refused", NEW)


@pytest.mark.parametrize(
    "spec",
    [
        {"speculation": {"draft": {"uri": "file:///mine"}}},
        {"speculation": {"method": "eagle"}},
        {"model": {"uri": "embedded://other"}},
    ],
    ids=["draft", "method", "target"],
)
@pytest.mark.parametrize("promoted", [False, True])
def test_a_draft_or_target_of_the_user_wins_at_once(spec: dict[str, object], promoted: bool) -> None:
    canary = trying()
    if promoted:
        canary.finish_pairs(60, 0.10)
    canary.change(**spec)
    canary.tick()
    assert canary.phase == "Serving"
    assert (canary.record.current, canary.record.trial) == ("", None)
    assert canary.decision.plan.assignment.stable is None
    assert outcomes(canary)[0] == ("Superseded", NEW)


def test_a_promoted_draft_that_does_not_come_back_after_a_trial_gives_way_to_that_of_the_spec() -> None:
    canary = promoted()
    offer_another(canary)
    assert canary.phase == "Canary"
    canary.carry_out("reject")
    assert outcomes(canary)[0] == ("Rejected", "third0third0")
    canary.pods[0].obeys, canary.pods[0].draft, canary.pods[0].swap_problem = False, "", "the folder is gone"
    canary.pods[0].trial = None
    canary.tick(20)
    assert (canary.phase, canary.record.current) == ("Cooldown", "")
    assert canary.decision.plan.assignment.stable is None


def test_another_image_ends_a_trial() -> None:
    canary = trying()
    template = canary.session.learned.template
    changed = canary.session.learned.model_copy(update={"template": template.model_copy(update={"image": "worker:2"})})
    canary.session = replace(canary.session, learned=changed)
    canary.tick()
    assert canary.phase == "RollingBack"
    assert outcomes(canary) == [("Superseded", NEW)]


def test_a_trial_ends_with_its_time() -> None:
    canary = trying(maxDuration="1h30m")
    canary.tick(5300)
    assert canary.phase == "Canary"
    canary.tick(200)
    assert canary.phase == "RollingBack"
    assert outcomes(canary) == [("Expired", NEW)]


def test_a_trial_without_drafts_waits_and_goes_on_with_its_evidence() -> None:
    canary = trying()
    canary.finish_pairs(3, 0.1)
    canary.change(speculation={"mode": "Off"})
    canary.ticks(3)
    assert (canary.phase, canary.record.trial.pod) == ("Canary", "")
    assert canary.decision.plan.assignment.trial is None
    assert [pod.trial for pod in canary.pods] == [None, None], "no pair runs in which neither draft is used"
    canary.change()
    canary.tick()
    assert (len(canary.record.trial.pairs), canary.tries.trial.pair) == (3, 3)
    canary.finish_pairs(60, 0.1)
    assert canary.phase == "Promoting"


@pytest.mark.parametrize("begun", [trying, with_candidate_of_unknown_hash], ids=["known hash", "reported hash"])
def test_a_removed_candidate_ends_its_trial_and_may_be_offered_again(begun: Callable[[], Canary]) -> None:
    canary = begun()
    canary.tries.trial = canary.tries.trial.model_copy(update={"hash": NEW})
    canary.ticks(2)
    first = canary.record.trial.id
    canary.withdraw()
    canary.tick()
    assert canary.phase == "RollingBack"
    assert "Rejected" in canary.record.last_verdict
    canary.until("Cooldown")
    canary.offer()
    canary.tick()
    assert canary.phase == "Canary"
    assert canary.record.trial.id != first


def test_a_retired_draft_is_tried_again_once_its_role_is_candidate() -> None:
    canary = trying()
    canary.command("reject")
    canary.until("Cooldown")
    assert outcomes(canary) == [("Rejected", NEW)]
    assert (canary.drafts[0].spec.role, canary.drafts[0].status.phase) == ("Retired", "Retired")
    canary.ticks(2)
    assert canary.phase == "Cooldown"
    canary.set_role(NEW, "Candidate")
    canary.tick()
    assert canary.phase == "Canary"
    assert (canary.drafts[0].status.outcome, canary.drafts[0].status.phase) == (None, "Canary")


def test_drafts_are_tried_one_after_the_other_the_oldest_first() -> None:
    canary = trying()
    offer_another(canary)
    assert [one.status.phase for one in canary.drafts] == ["Canary", "Waiting"]
    canary.command("reject")
    canary.ticks(4)
    assert (canary.phase, canary.record.candidate) == ("Canary", "third0third0")
    assert [one.status.phase for one in canary.drafts] == ["Retired", "Canary"]


def test_a_worker_reports_the_hash_of_a_candidate_and_the_trial_is_of_it_alone() -> None:
    canary = with_candidate_of_unknown_hash()
    first = canary.tries
    assert canary.phase == "Canary"
    assignment = canary.decision.plan.assignment
    assert assignment.trial.candidate == Artifact(uri="file:///new", hash="")
    canary.finish_pairs(3, 0.5)
    assert canary.record.trial.pairs == (), "nothing counts before the hash is known"
    first.trial = first.trial.model_copy(update={"hash": NEW})
    canary.ticks(2)
    assert (canary.record.candidate, canary.record.uris[NEW]) == (NEW, "file:///new")
    assignment = canary.decision.plan.assignment
    assert assignment.trial.candidate.hash == NEW
    assert assignment.trial.id.startswith(NEW), "it begins anew"
    assert canary.drafts[0].spec.hash == NEW, "and the SpecDecodeDraft has the hash"
    canary.restart_operator()
    canary.finish_pairs(60, 0.10)
    canary.until("Cooldown")
    assert outcomes(canary) == [("Promoted", NEW)]
    canary.ticks(3)
    assert canary.phase == "Cooldown", "it is tried once"


def test_a_candidate_that_turns_out_to_be_in_use_is_refused() -> None:
    canary = with_candidate_of_unknown_hash()
    tries = canary.tries
    tries.trial = tries.trial.model_copy(update={"hash": OLD})
    canary.until("Cooldown")
    assert [outcome for outcome, _ in outcomes(canary)] == ["Refused"]
    assert [pod.draft for pod in canary.pods] == [OLD, OLD]


def restored(canary: Canary) -> Canary:
    """Return a cluster to which the drafts were applied from a copy of them: without status, with other uids."""
    new = Canary(canary.deployment, now=canary.now + 3600)
    new.drafts = [
        SpecDecodeDraft(metadata={"name": one.name, "namespace": "ns", "uid": f"again-{one.name}"}, spec=one.spec)
        for one in canary.drafts
    ]
    return new


def test_a_promoted_draft_serves_again_after_a_restore_and_the_plan_is_learnt_again() -> None:
    canary = promoted()
    (draft,) = canary.drafts
    assert (draft.spec.role, draft.spec.hash, draft.spec.uri) == ("Serving", NEW, "file:///new")
    assert (draft.spec.base.draft, draft.spec.base.hash) == ("embedded://d", OLD)
    assert (draft.status.phase, draft.status.outcome, draft.status.pairs > 5) == ("Serving", "Promoted", True)
    new = restored(canary)
    new.until("Cooldown")
    assert new.record.current == NEW
    assert [pod.draft for pod in new.pods] == [NEW, NEW]
    assert new.session.learned.draft == NEW
    assert new.drafts[0].status.outcome == "Promoted"
    new.carry_out("rollback")
    new.until("Cooldown")
    assert [pod.draft for pod in new.pods] == [OLD, OLD], "that of the spec"


def test_after_a_second_promotion_a_restore_serves_the_second_and_returns_to_the_first() -> None:
    canary = promoted()
    offer_another(canary)
    canary.finish_pairs(60, 0.10)
    canary.until("Cooldown")
    assert [one.spec.role for one in canary.drafts] == ["Retired", "Serving"]
    assert [one.status.phase for one in canary.drafts] == ["Retired", "Serving"]
    new = restored(canary)
    new.until("Cooldown")
    assert (new.record.current, new.record.previous) == ("third0third0", NEW)
    new.carry_out("rollback")
    new.until("Cooldown")
    assert [pod.draft for pod in new.pods] == [NEW, NEW]
    assert [one.spec.role for one in new.drafts] == ["Serving", "Retired"]


def test_a_draft_of_another_model_does_not_serve_after_a_restore() -> None:
    canary = promoted()
    canary.change(model={"uri": "embedded://other"})
    new = restored(canary)
    new.ticks(3)
    assert new.record.current == ""
    assert (new.drafts[0].spec.role, new.drafts[0].status.outcome) == ("Retired", "Refused")
    assert "spec.base" in new.drafts[0].status.reason


@pytest.mark.parametrize("written", range(6))
def test_a_promotion_that_is_cut_off_between_two_writes_goes_on(written: int) -> None:
    canary = promoted()
    offer_another(canary)
    saved = canary.session
    pairs = 0
    while canary.phase == "Canary":
        saved, pairs = canary.session, pairs + 1
        pod = canary.tries
        index = pod.trial.pair
        pod.trial = pod.trial.model_copy(update={"pairs": (pair(index, 0.1),), "pair": index + 1})
        canary.tick(push=False)
        if canary.phase == "Canary":
            canary.push()
    canary.write_drafts(written)
    canary.session = replace(saved, drafts=parse_training(render_training(saved.drafts)))
    canary.tick()
    canary.until("Cooldown", ticks=60)
    assert (canary.record.current, canary.record.previous) == ("third0third0", NEW)
    assert [one.spec.role for one in canary.drafts] == ["Retired", "Serving"]
    canary.carry_out("rollback")
    canary.until("Cooldown")
    assert (canary.record.current, [one.spec.role for one in canary.drafts]) == (NEW, ["Serving", "Retired"])


@pytest.mark.parametrize("how", ["retired", "deleted", "after a reject"])
def test_a_user_ends_the_draft_in_use_while_another_one_is_tried(how: str) -> None:
    canary = promoted()
    offer_another(canary)
    canary.finish_pairs(3, 0.0)
    if how == "after a reject":
        canary.carry_out("reject")
    if how == "deleted":
        canary.drafts = [one for one in canary.drafts if one.id != NEW]
    else:
        canary.command("rollback")
    canary.tick()
    assert (canary.phase, canary.record.current) == ("RollingBack", "")
    tried = "Rejected" if how == "after a reject" else "Superseded"
    assert outcomes(canary) == [("RolledBack", NEW), (tried, "third0third0")]
    assert [entry.pairs for entry in canary.record.lineage] == [0, 3]
    canary.until("Cooldown")
    assert [pod.draft for pod in canary.pods] == [OLD, OLD]
    assert {one.spec.role for one in canary.drafts} == {"Retired"}


def test_a_tried_draft_is_promoted_although_the_one_in_use_is_retired() -> None:
    canary = promoted()
    offer_another(canary)
    canary.command("promote")
    canary.carry_out("rollback")
    assert (canary.phase, canary.record.current) == ("Promoting", "third0third0")


def test_manual_mode_waits_for_promote() -> None:
    canary = trying(mode="Manual")
    canary.finish_pairs(60, 0.10)
    assert (canary.phase, canary.record.is_confirmed) == ("Canary", True)
    canary.ticks(5)
    assert canary.decision.plan.assignment is not None
    assert canary.pods[0].trial is None, "the trial is over"
    canary.carry_out("promote")
    assert canary.phase == "Promoting"


def test_a_paused_deployment_keeps_its_rollout() -> None:
    canary = trying()
    canary.deployment = with_pause(canary.deployment)
    canary.tries.boot = "boot-2"
    plan = canary.session.learned.plan
    canary.tick(100_000)
    assert canary.phase == "Canary"
    assert canary.decision.plan == plan
    canary.deployment = with_pause(canary.deployment, False)
    canary.tick()
    assert canary.phase == "RollingBack", "its time is over"


def test_a_veto_of_one_task_rolls_back() -> None:
    canary = trying()
    pod = canary.tries
    for index in range(60):
        fast, slow = pair(index, 0.25), pair(index, -0.15, "code")
        both = fast.model_copy(
            update={"incumbent": fast.incumbent + slow.incumbent, "candidate": fast.candidate + slow.candidate}
        )
        pod.trial = pod.trial.model_copy(update={"pairs": (both,)})
        canary.change(speculation={"tasks": [{"name": "code"}]})
        canary.tick()
        if canary.phase != "Canary":
            break
    assert canary.phase == "RollingBack"


def learnt(canary: Canary) -> tuple[tuple[RowState, ...], tuple[StepTimeCell, ...], tuple[AcceptanceCell, ...]]:
    learned = canary.session.learned
    return learned.rows, learned.costs, learned.acceptance


def with_estimates(canary: Canary) -> None:
    """Give the deployment rows, acceptance and drafted step times."""
    learned = canary.session.learned
    moments = (400.0, 8.0, 0.2, 1600.0, 400.0, 400.0, 1600.0, 2e5, 1200.0, 0.0, *[1.0] * 6, *[1.0] * 21)
    known = learned.model_copy(
        update={
            "rows": (RowState(concurrency=0, context=0, task="other", depth=5, since=1.0),),
            "acceptance": (AcceptanceCell(task="other", depth=1, hits=700, total=1000, at=1.0),),
            "costs": (
                StepTimeCell(tokens_bucket=4, draft_passes=3, prefill=False, context_bucket=0, values=moments, at=1.0),
            ),
        }
    )
    canary.session = replace(canary.session, learned=known)


def test_with_two_workers_a_canary_changes_no_rows_or_costs() -> None:
    canary = canary_with()
    canary.pods[0].name = "aaa"
    with_estimates(canary)
    canary.tick()
    before = learnt(canary)
    for _ in range(6):
        canary.tries.draft = NEW if canary.tries.draft == OLD else OLD
        canary.tries.drafted += 500
        canary.tick(push=False)
        assert canary.session.learned.draft == OLD
        assert learnt(canary) == before


def test_the_other_workers_are_learnt_from_during_a_canary() -> None:
    canary = trying()
    for _ in range(3):
        canary.pods[1].drafted += 500
        canary.tick()
    (cell,) = canary.session.learned.acceptance
    assert cell.total == pytest.approx(1500, rel=0.2)


def test_a_promotion_moves_rows_and_costs_to_the_new_hash_and_a_rollback_moves_them_back() -> None:
    canary = canary_with()
    with_estimates(canary)
    canary.tick()
    rows, costs, acceptance = learnt(canary)
    assert rows[0].since
    canary.tick()
    canary.finish_pairs(60, 0.10)
    assert canary.session.learned.draft == NEW
    assert learnt(canary) == (rows, costs, acceptance)
    assert OLD in [parked.draft for parked in canary.session.learned.parked]
    canary.until("Cooldown")
    canary.carry_out("rollback")
    assert canary.session.learned.draft == OLD
    again = learnt(canary)
    assert (again[0][0].shape, again[0][0].since) == (rows[0].shape, rows[0].since)
    assert again[1:] == (costs, acceptance)


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_candidate_that_is_deleted_while_no_operator_runs_ends_its_trial(is_promoted: bool) -> None:
    canary = trying()
    if is_promoted:
        canary.finish_pairs(60, 0.10)
        canary.until("Cooldown")
        offer_another(canary)
        assert canary.phase == "Canary"
    stored = parse_training(render_training(canary.record))
    canary.drafts = canary.drafts[:-1]
    canary.session = replace(canary.session, drafts=stored)
    canary.tick()
    canary.until("Cooldown")
    assert canary.record.current == (NEW if is_promoted else "")
