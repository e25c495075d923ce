"""Life cycle of drafts: phases, events and transitions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Phase of a deployment's drafts."""

    SERVING = "Serving"
    COLLECTING = "Collecting"
    DISTILLING = "Distilling"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    COOLDOWN = "Cooldown"


class Mode(StrEnum):
    """Way of a candidate into service (spec: draftRollout.mode)."""

    CANARY = "Canary"
    DIRECT = "Direct"
    """The verdict of the training Job is enough."""
    MANUAL = "Manual"
    """A user promotes, once the canary test says that the candidate is better."""


class EventKind(StrEnum):
    """Kind of an event. Those that start with ``USER_`` are commands."""

    RUN_REQUESTED = "RunRequested"
    """A drift that is worth a run, the schedule, or a user."""
    CAPTURES_READY = "CapturesReady"
    CAPTURES_POISONED = "CapturesPoisoned"
    """Over 20 % of the captured text is not reproduced by the target."""
    JOB_BETTER = "JobBetter"
    JOB_BETTER_DIRECT = "JobBetterDirect"
    """JOB_BETTER in Direct mode."""
    JOB_NOT_BETTER = "JobNotBetter"
    JOB_FAILED = "JobFailed"
    """The Job gave up after its back-off."""
    JOB_LOST = "JobLost"
    CANARY_BETTER = "CanaryBetter"
    CANARY_BETTER_MANUAL = "CanaryBetterManual"
    """CANARY_BETTER in Manual mode."""
    CANARY_WORSE = "CanaryWorse"
    CANARY_UNDECIDED = "CanaryUndecided"
    CANARY_POD_LOST = "CanaryPodLost"
    CANARY_FAILED = "CanaryFailed"
    """The canary pod was lost as often as the failure limit says."""
    LOAD_REFUSED = "LoadRefused"
    """A worker refused the assigned draft: wrong shapes, NaN, truncated, vanished."""
    CONVERGED = "Converged"
    """Every worker reports the assigned draft."""
    ARTEFACT_LOST = "ArtefactLost"
    """The promoted draft's files are gone; the draft of the spec serves."""
    TIME_OVER = "TimeOver"
    """The time limit of the phase has passed."""
    DRAFT_CHANGED = "DraftChanged"
    """A user changed the draft of the spec."""
    TARGET_CHANGED = "TargetChanged"
    IMAGE_CHANGED = "ImageChanged"
    USER_CANDIDATE = "UserCandidate"
    """A user offers a draft of their own as the candidate."""
    USER_PROMOTE = "UserPromote"
    """A user wants a draft to serve, whatever its trial says; also after a restore."""
    USER_REJECT = "UserReject"
    USER_ROLLBACK = "UserRollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One transition: the next phase, and changes of the stored hashes."""

    phase: Phase
    takes_candidate: bool = False
    drops_candidate: bool = False
    confirms: bool = False
    counts_loss: bool = False
    promotes: bool = False
    restores_previous: bool = False
    returns_to_spec: bool = False
    """The draft of the spec is assigned again, and there is nothing to roll back to."""
    deletes_captures: bool = False


_ABANDON = Row(phase=Phase.COOLDOWN, drops_candidate=True)
_NEW_SPEC = Row(phase=Phase.SERVING, drops_candidate=True, returns_to_spec=True, deletes_captures=True)

ALWAYS: Mapping[EventKind, Row] = {
    # A user's change wins in every phase: nothing that was measured or trained for the old pair is used.
    EventKind.DRAFT_CHANGED: _NEW_SPEC,
    EventKind.TARGET_CHANGED: _NEW_SPEC,
    EventKind.ARTEFACT_LOST: Row(phase=Phase.COOLDOWN, drops_candidate=True, returns_to_spec=True),
}
"""Transitions that are the same in every phase."""

_RESTORE = Row(phase=Phase.ROLLING_BACK, drops_candidate=True, restores_previous=True)
_ROLL_BACK = Row(phase=Phase.ROLLING_BACK, drops_candidate=True)
_POISONED = Row(phase=Phase.COOLDOWN, drops_candidate=True, deletes_captures=True)
_OFFERED = Row(phase=Phase.CANARY, takes_candidate=True)
_APPOINTED = Row(phase=Phase.PROMOTING, takes_candidate=True, confirms=True, promotes=True)

PHASES: Mapping[Phase, Mapping[EventKind, Row]] = {
    Phase.SERVING: {
        EventKind.RUN_REQUESTED: Row(phase=Phase.COLLECTING),
        EventKind.USER_CANDIDATE: _OFFERED,
        EventKind.USER_PROMOTE: _APPOINTED,
        EventKind.USER_ROLLBACK: _RESTORE,
    },
    Phase.COLLECTING: {
        EventKind.CAPTURES_READY: Row(phase=Phase.DISTILLING),
        EventKind.CAPTURES_POISONED: _POISONED,
        EventKind.TIME_OVER: _ABANDON,
        EventKind.USER_REJECT: _ABANDON,
        EventKind.USER_ROLLBACK: _RESTORE,
    },
    Phase.DISTILLING: {
        EventKind.CAPTURES_POISONED: _POISONED,
        EventKind.JOB_BETTER: Row(phase=Phase.CANARY, takes_candidate=True, deletes_captures=True),
        EventKind.JOB_BETTER_DIRECT: Row(
            phase=Phase.PROMOTING, takes_candidate=True, confirms=True, promotes=True, deletes_captures=True
        ),
        EventKind.JOB_NOT_BETTER: Row(phase=Phase.COOLDOWN, deletes_captures=True),
        EventKind.JOB_FAILED: _ABANDON,
        EventKind.JOB_LOST: Row(phase=Phase.DISTILLING),
        EventKind.TIME_OVER: _ABANDON,
        EventKind.USER_REJECT: _ABANDON,
        EventKind.USER_ROLLBACK: _RESTORE,
    },
    Phase.CANARY: {
        EventKind.CANARY_BETTER: Row(phase=Phase.PROMOTING, confirms=True, promotes=True),
        EventKind.CANARY_BETTER_MANUAL: Row(phase=Phase.CANARY, confirms=True),
        EventKind.CANARY_WORSE: _ROLL_BACK,
        EventKind.CANARY_UNDECIDED: _ROLL_BACK,
        EventKind.CANARY_POD_LOST: Row(phase=Phase.CANARY, counts_loss=True),
        EventKind.CANARY_FAILED: _ROLL_BACK,
        EventKind.LOAD_REFUSED: _ROLL_BACK,
        EventKind.TIME_OVER: _ROLL_BACK,
        EventKind.USER_PROMOTE: Row(phase=Phase.PROMOTING, confirms=True, promotes=True),
        EventKind.USER_REJECT: _ROLL_BACK,
        EventKind.USER_ROLLBACK: _ROLL_BACK,
        # Costs of the old image say nothing about the candidate on the new one.
        EventKind.IMAGE_CHANGED: _ROLL_BACK,
    },
    Phase.PROMOTING: {
        EventKind.CONVERGED: _ABANDON,
        EventKind.LOAD_REFUSED: _RESTORE,
        EventKind.TIME_OVER: _RESTORE,
        EventKind.USER_REJECT: _RESTORE,
        EventKind.USER_ROLLBACK: _RESTORE,
    },
    Phase.ROLLING_BACK: {
        EventKind.CONVERGED: Row(phase=Phase.COOLDOWN),
        # The incumbent does not load any more: only the draft of the spec is left.
        EventKind.LOAD_REFUSED: Row(phase=Phase.COOLDOWN, returns_to_spec=True),
        EventKind.TIME_OVER: Row(phase=Phase.COOLDOWN),
    },
    Phase.COOLDOWN: {
        EventKind.TIME_OVER: Row(phase=Phase.SERVING),
        # Only a user requests a run here: drift and schedule wait for the end of the phase.
        EventKind.RUN_REQUESTED: Row(phase=Phase.COLLECTING),
        EventKind.USER_CANDIDATE: _OFFERED,
        EventKind.USER_PROMOTE: _APPOINTED,
        EventKind.USER_ROLLBACK: _RESTORE,
    },
}
"""Transitions by phase. Other events come too late for a phase, or it refuses them: they change nothing."""

# State machine of a deployment's drafts, as a pure function: `advance(state, event)`.
#
# What a phase needs (assignment, capture, a trial, a Job) follows from the stored state and from what is true in the
# cluster, so that an operator that was killed goes on from there.

FAILURE_LIMIT = 3
"""Losses of the canary pod after which the candidate is rolled back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. ``draft`` is the hash of a draft, where the event names one."""

    kind: EventKind
    draft: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """State of the drafts of one deployment. Hashes are those of artefacts.

    An empty ``current`` is the draft of the spec, an empty ``candidate`` is none. ``previous`` is what a rollback
    returns to; None if there is nothing to return to.
    """

    phase: Phase = Phase.SERVING
    mode: Mode = Mode.CANARY
    current: str = ""
    candidate: str = ""
    previous: str | None = None
    is_confirmed: bool = False
    """True if a verdict allows the promotion of ``candidate``: of its canary, in Direct mode of its evaluation."""
    canary_losses: int = 0


class Transition(NamedTuple):
    """Next state, and whether captured requests are deleted."""

    state: Lifecycle
    deletes_captures: bool = False


def advance(state: Lifecycle, event: Event) -> Transition:
    """Return the next state. Every event is defined in every phase; late ones change nothing."""
    kind = _effective_kind(state, event.kind)
    row = ALWAYS.get(kind) or PHASES[state.phase].get(kind)
    if row is None or not _is_allowed(state, row, event):
        return Transition(state)
    return Transition(_after(state, row, event), row.deletes_captures)


def _effective_kind(state: Lifecycle, kind: EventKind) -> EventKind:
    """Return the event that counts, where it depends on the mode or on earlier losses."""
    if kind is EventKind.CANARY_POD_LOST and state.canary_losses + 1 >= FAILURE_LIMIT:
        return EventKind.CANARY_FAILED
    if kind in (EventKind.JOB_BETTER, EventKind.JOB_BETTER_DIRECT):
        return EventKind.JOB_BETTER_DIRECT if state.mode is Mode.DIRECT else EventKind.JOB_BETTER
    if kind in (EventKind.CANARY_BETTER, EventKind.CANARY_BETTER_MANUAL):
        return EventKind.CANARY_BETTER_MANUAL if state.mode is Mode.MANUAL else EventKind.CANARY_BETTER
    return kind


def _is_allowed(state: Lifecycle, row: Row, event: Event) -> bool:
    """Return whether the transition is allowed.

    A candidate needs a hash, a promotion a verdict, and a rollback a draft to return to.
    """
    if row.takes_candidate and not event.draft:
        return False
    if row.promotes:
        return row.confirms or state.is_confirmed
    return not row.restores_previous or state.previous is not None


def _after(state: Lifecycle, row: Row, event: Event) -> Lifecycle:
    """Return the state after the transition of a row."""
    after = replace(state, phase=row.phase)
    if row.takes_candidate:
        after = replace(after, candidate=event.draft)
    if row.confirms:
        after = replace(after, is_confirmed=True)
    if row.counts_loss:
        after = replace(after, canary_losses=state.canary_losses + 1)
    if row.promotes:
        after = replace(after, previous=state.current, current=after.candidate)
    if row.restores_previous:
        after = replace(after, current=state.previous or "", previous="" if state.previous else None)
    if row.returns_to_spec:
        after = replace(after, current="", previous=None)
    if row.drops_candidate:
        after = replace(after, candidate="", canary_losses=0, is_confirmed=False)
    return after
