"""State machine of drafts: complete, without a promotion that no verdict allows, and without a dead end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specdecode_operator.drafts.lifecycle import (
    Event,
    EventKind,
    Lifecycle,
    Mode,
    Phase,
    advance,
)

EVENTS = [Event(kind=kind, draft=draft) for kind in EventKind for draft in ("", "a", "b")]


def in_phase(phase: Phase, **fields: object) -> Lifecycle:
    """Return a state of a deployment with a candidate and a previous draft."""
    state = Lifecycle(phase=phase, current="incumbent", candidate="new", previous="old")
    return replace(state, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", EventKind)
def test_late_events_change_nothing(phase: Phase, kind: EventKind) -> None:
    """A job's verdict without a Job, a canary's without a canary, a convergence that nothing waits for."""
    trained = kind.name.startswith(("JOB_", "CAPTURES_")) and phase not in (Phase.COLLECTING, Phase.DISTILLING)
    tried = kind.name.startswith("CANARY_") and phase is not Phase.CANARY
    rolled = kind is EventKind.CONVERGED and phase not in (Phase.PROMOTING, Phase.ROLLING_BACK)
    if trained or tried or rolled:
        assert advance(in_phase(phase), Event(kind=kind, draft="x")) == (in_phase(phase), False)


Known = tuple[Lifecycle, bool]
"""A state, and whether a verdict for its candidate was seen on the way to it."""


def reachable(mode: Mode) -> Iterator[tuple[Known, Event, Known]]:
    """Yield every transition from every state that any sequence of events leads to, with three drafts."""
    start: Known = (Lifecycle(mode=mode), False)
    known, queue = {start}, [start]
    while queue:
        before = queue.pop()
        for event in EVENTS:
            after = advance(before[0], event).state
            seen = (before[1] and after.candidate == before[0].candidate) or is_verdict(before[0], event)
            following = (after, seen and bool(after.candidate))
            yield before, event, (after, seen)
            if following not in known:
                known.add(following)
                queue.append(following)


def is_verdict(state: Lifecycle, event: Event) -> bool:
    """Return whether the event says that a candidate is better, as far as the mode accepts it, or is a user's word."""
    if event.kind is EventKind.USER_PROMOTE:
        return state.phase is Phase.CANARY or bool(event.draft)
    if state.phase is Phase.CANARY:
        return event.kind in (EventKind.CANARY_BETTER, EventKind.CANARY_BETTER_MANUAL)
    by_job = event.kind in (EventKind.JOB_BETTER, EventKind.JOB_BETTER_DIRECT)
    return by_job and state.phase is Phase.DISTILLING and state.mode is Mode.DIRECT and bool(event.draft)


@pytest.mark.parametrize("mode", Mode)
def test_no_path_promotes_without_a_verdict_for_that_candidate(mode: Mode) -> None:
    promotions = 0
    for (before, _), event, (after, seen) in reachable(mode):
        if after.phase is Phase.PROMOTING and before.phase is not Phase.PROMOTING:
            promotions += 1
            assert seen, (before, event)
            assert after.current == after.candidate == (before.candidate or event.draft)
        elif after.current != before.current:
            assert after.current in (before.previous or "", ""), "a rollback, a new draft or a lost artefact"
            assert after.candidate == ""
    assert promotions


@pytest.mark.parametrize("mode", Mode)
def test_time_leads_back_to_serving_from_every_state(mode: Mode) -> None:
    for state in {after for _, _, (after, _) in reachable(mode)}:
        after = state
        for _ in range(3):
            after = advance(after, Event(kind=EventKind.TIME_OVER)).state
        assert (after.phase, after.candidate) == (Phase.SERVING, ""), state


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", [EventKind.DRAFT_CHANGED, EventKind.TARGET_CHANGED])
def test_a_change_by_the_user_wins_in_every_phase(phase: Phase, kind: EventKind) -> None:
    done = advance(in_phase(phase), Event(kind=kind))
    assert done == (Lifecycle(), True)


def test_three_losses_of_the_canary_pod_roll_back() -> None:
    state, phases = in_phase(Phase.CANARY), []
    for _ in range(3):
        state = advance(state, Event(kind=EventKind.CANARY_POD_LOST)).state
        phases.append(state.phase)
    assert phases == [Phase.CANARY, Phase.CANARY, Phase.ROLLING_BACK]
    assert (state.current, state.candidate) == ("incumbent", "")


def test_a_refused_promotion_returns_to_the_previous_draft() -> None:
    promoted = advance(in_phase(Phase.CANARY), Event(kind=EventKind.CANARY_BETTER)).state
    assert (promoted.phase, promoted.current, promoted.previous) == (Phase.PROMOTING, "new", "incumbent")
    done = advance(promoted, Event(kind=EventKind.LOAD_REFUSED))
    assert (done.state.phase, done.state.current, done.state.candidate) == (Phase.ROLLING_BACK, "incumbent", "")


def test_a_manual_rollout_waits_for_the_user() -> None:
    state = in_phase(Phase.CANARY, mode=Mode.MANUAL)
    better = advance(state, Event(kind=EventKind.CANARY_BETTER)).state
    assert (better.phase, better.is_confirmed) == (Phase.CANARY, True)
    for before in (state, better):
        assert advance(before, Event(kind=EventKind.USER_PROMOTE)).state.phase is Phase.PROMOTING


def test_after_a_rollback_to_a_promoted_draft_the_one_of_the_spec_is_left() -> None:
    state = in_phase(Phase.SERVING)
    for current, previous in (("old", ""), ("", None)):
        state = replace(advance(state, Event(kind=EventKind.USER_ROLLBACK)).state, phase=Phase.SERVING)
        assert (state.current, state.previous) == (current, previous)


def test_direct_mode_promotes_by_the_verdict_of_the_job() -> None:
    state = in_phase(Phase.DISTILLING, mode=Mode.DIRECT, candidate="")
    done = advance(state, Event(kind=EventKind.JOB_BETTER, draft="trained"))
    assert (done.state.phase, done.state.current, done.state.previous) == (Phase.PROMOTING, "trained", "incumbent")
    assert done.deletes_captures, "captured text is deleted after the verdict"


def test_a_lost_job_is_created_again_and_poisoned_captures_are_deleted() -> None:
    lost = advance(in_phase(Phase.DISTILLING, candidate=""), Event(kind=EventKind.JOB_LOST))
    assert lost == (in_phase(Phase.DISTILLING, candidate=""), False), "another Job is created for the same run"
    for phase in (Phase.COLLECTING, Phase.DISTILLING):
        poisoned = advance(in_phase(phase, candidate=""), Event(kind=EventKind.CAPTURES_POISONED))
        assert poisoned.state.phase is Phase.COOLDOWN
        assert poisoned.deletes_captures


def test_a_lost_artefact_leaves_the_draft_of_the_spec() -> None:
    after = advance(in_phase(Phase.SERVING), Event(kind=EventKind.ARTEFACT_LOST)).state
    assert (after.phase, after.current, after.previous) == (Phase.COOLDOWN, "", None)


def test_one_run_from_drift_to_promotion() -> None:
    kinds = ["RunRequested", "CapturesReady", "JobBetter", "CanaryBetter", "Converged", "TimeOver"]
    state, phases = Lifecycle(current="old"), []
    for kind in kinds:
        state = advance(state, Event(kind=EventKind(kind), draft="new")).state
        phases.append(state.phase.value)
    assert phases == ["Collecting", "Distilling", "Canary", "Promoting", "Cooldown", "Serving"]
    assert state == Lifecycle(current="new", previous="old")
