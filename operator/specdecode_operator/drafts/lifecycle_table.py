"""Phases, events, actions and transitions of the life cycle of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
    USER_REJECT = "UserReject"
    USER_ROLLBACK = "UserRollback"
    PAUSED = "Paused"
    RESUMED = "Resumed"


class Action(StrEnum):
    """Idempotent side effect. The assignment in the plan's ConfigMap follows ``current`` and ``candidate``."""

    CAPTURE = "Capture"
    STOP_CAPTURE = "StopCapture"
    DELETE_CAPTURES = "DeleteCaptures"
    CREATE_JOB = "CreateJob"
    DELETE_JOB = "DeleteJob"
    RUN_CANARY = "RunCanary"
    END_CANARY = "EndCanary"
    ASSIGN_CURRENT = "AssignCurrent"
    ASSIGN_SPEC_DRAFT = "AssignSpecDraft"
    REKEY_ROWS = "RekeyRows"
    """Rows and costs of the plan move to the new hash."""
    LEARN_BASELINE = "LearnBaseline"
    START_COOLDOWN = "StartCooldown"
    REPORT = "Report"
    """Event with numbers, history and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One transition: the next phase, actions of its own, and changes of the stored hashes."""

    phase: Phase
    actions: tuple[Action, ...] = (Action.REPORT,)
    takes_candidate: bool = False
    drops_candidate: bool = False
    confirms: bool = False
    counts_loss: bool = False
    promotes: bool = False
    restores_previous: bool = False
    sets_current: bool = False


PHASE_ACTIONS: Mapping[Phase, tuple[Action, ...]] = {
    Phase.SERVING: (Action.ASSIGN_CURRENT,),
    Phase.COLLECTING: (Action.ASSIGN_CURRENT, Action.CAPTURE),
    Phase.DISTILLING: (Action.ASSIGN_CURRENT, Action.CREATE_JOB),
    Phase.CANARY: (Action.ASSIGN_CURRENT, Action.RUN_CANARY),
    Phase.PROMOTING: (Action.REKEY_ROWS, Action.ASSIGN_CURRENT),
    Phase.ROLLING_BACK: (Action.END_CANARY, Action.REKEY_ROWS, Action.ASSIGN_CURRENT),
    Phase.COOLDOWN: (Action.ASSIGN_CURRENT, Action.START_COOLDOWN),
}
"""Actions that a phase needs, on entry and after a restart."""

_CLEAN = (Action.DELETE_JOB, Action.END_CANARY, Action.STOP_CAPTURE, Action.REPORT)
_ABANDON = Row(phase=Phase.COOLDOWN, actions=_CLEAN, drops_candidate=True)
_NEW_SPEC = (*_CLEAN, Action.DELETE_CAPTURES, Action.ASSIGN_SPEC_DRAFT, Action.LEARN_BASELINE)

ALWAYS: Mapping[EventKind, Row] = {
    # A user's change wins in every phase: nothing that was measured or trained for the old pair is used.
    EventKind.DRAFT_CHANGED: Row(phase=Phase.SERVING, actions=_NEW_SPEC, drops_candidate=True, sets_current=True),
    EventKind.TARGET_CHANGED: Row(phase=Phase.SERVING, actions=_NEW_SPEC, drops_candidate=True, sets_current=True),
    EventKind.ARTEFACT_LOST: Row(
        phase=Phase.COOLDOWN,
        actions=(*_CLEAN, Action.ASSIGN_SPEC_DRAFT, Action.LEARN_BASELINE),
        drops_candidate=True,
        sets_current=True,
    ),
}
"""Transitions that are the same in every phase."""

_IMAGE = (Action.LEARN_BASELINE, Action.REPORT)
_VERDICT = (Action.STOP_CAPTURE, Action.DELETE_CAPTURES, Action.REPORT)
_RESTORE = Row(phase=Phase.ROLLING_BACK, actions=_CLEAN, drops_candidate=True, restores_previous=True)
_ROLL_BACK = Row(phase=Phase.ROLLING_BACK, actions=_CLEAN, drops_candidate=True)
_POISONED = Row(phase=Phase.COOLDOWN, actions=(*_CLEAN, Action.DELETE_CAPTURES), drops_candidate=True)
_OFFERED = Row(phase=Phase.CANARY, takes_candidate=True)

PHASES: Mapping[Phase, Mapping[EventKind, Row]] = {
    Phase.SERVING: {
        EventKind.RUN_REQUESTED: Row(phase=Phase.COLLECTING),
        EventKind.USER_CANDIDATE: _OFFERED,
        EventKind.USER_ROLLBACK: _RESTORE,
        EventKind.IMAGE_CHANGED: Row(phase=Phase.SERVING, actions=_IMAGE),
    },
    Phase.COLLECTING: {
        EventKind.CAPTURES_READY: Row(phase=Phase.DISTILLING),
        EventKind.CAPTURES_POISONED: _POISONED,
        EventKind.TIME_OVER: _ABANDON,
        EventKind.USER_REJECT: _ABANDON,
        EventKind.USER_ROLLBACK: _RESTORE,
        EventKind.IMAGE_CHANGED: Row(phase=Phase.COLLECTING, actions=_IMAGE),
    },
    Phase.DISTILLING: {
        EventKind.CAPTURES_POISONED: _POISONED,
        EventKind.JOB_BETTER: Row(phase=Phase.CANARY, actions=_VERDICT, takes_candidate=True),
        EventKind.JOB_BETTER_DIRECT: Row(
            phase=Phase.PROMOTING, actions=_VERDICT, takes_candidate=True, confirms=True, promotes=True
        ),
        EventKind.JOB_NOT_BETTER: Row(phase=Phase.COOLDOWN, actions=(*_CLEAN, Action.DELETE_CAPTURES)),
        EventKind.JOB_FAILED: _ABANDON,
        EventKind.JOB_LOST: Row(phase=Phase.DISTILLING, actions=(Action.CREATE_JOB, Action.REPORT)),
        EventKind.TIME_OVER: _ABANDON,
        EventKind.USER_REJECT: _ABANDON,
        EventKind.USER_ROLLBACK: _RESTORE,
        EventKind.IMAGE_CHANGED: Row(phase=Phase.DISTILLING, actions=_IMAGE),
    },
    Phase.CANARY: {
        EventKind.CANARY_BETTER: Row(
            phase=Phase.PROMOTING, actions=(Action.END_CANARY, Action.REPORT), confirms=True, promotes=True
        ),
        EventKind.CANARY_BETTER_MANUAL: Row(phase=Phase.CANARY, confirms=True),
        EventKind.CANARY_WORSE: _ROLL_BACK,
        EventKind.CANARY_UNDECIDED: _ROLL_BACK,
        EventKind.CANARY_POD_LOST: Row(
            phase=Phase.CANARY, actions=(Action.RUN_CANARY, Action.REPORT), counts_loss=True
        ),
        EventKind.CANARY_FAILED: _ROLL_BACK,
        EventKind.LOAD_REFUSED: _ROLL_BACK,
        EventKind.TIME_OVER: _ROLL_BACK,
        EventKind.USER_PROMOTE: Row(phase=Phase.PROMOTING, actions=(Action.END_CANARY, Action.REPORT), promotes=True),
        EventKind.USER_REJECT: _ROLL_BACK,
        EventKind.USER_ROLLBACK: _ROLL_BACK,
        # Costs of the old image say nothing about the candidate on the new one.
        EventKind.IMAGE_CHANGED: Row(phase=Phase.ROLLING_BACK, actions=_IMAGE, drops_candidate=True),
    },
    Phase.PROMOTING: {
        EventKind.CONVERGED: Row(
            phase=Phase.COOLDOWN, actions=(Action.LEARN_BASELINE, Action.REPORT), drops_candidate=True
        ),
        EventKind.LOAD_REFUSED: _RESTORE,
        EventKind.TIME_OVER: _RESTORE,
        EventKind.USER_REJECT: _RESTORE,
        EventKind.USER_ROLLBACK: _RESTORE,
        EventKind.IMAGE_CHANGED: Row(phase=Phase.PROMOTING, actions=_IMAGE),
    },
    Phase.ROLLING_BACK: {
        EventKind.CONVERGED: Row(phase=Phase.COOLDOWN),
        # The incumbent does not load any more: only the draft of the spec is left.
        EventKind.LOAD_REFUSED: Row(phase=Phase.COOLDOWN, actions=(Action.ASSIGN_SPEC_DRAFT, Action.REPORT)),
        EventKind.TIME_OVER: Row(phase=Phase.COOLDOWN),
        EventKind.IMAGE_CHANGED: Row(phase=Phase.ROLLING_BACK, actions=_IMAGE),
    },
    Phase.COOLDOWN: {
        EventKind.TIME_OVER: Row(phase=Phase.SERVING),
        # Only a user requests a run here: drift and schedule wait for the end of the phase.
        EventKind.RUN_REQUESTED: Row(phase=Phase.COLLECTING),
        EventKind.USER_CANDIDATE: _OFFERED,
        EventKind.USER_ROLLBACK: _RESTORE,
        EventKind.IMAGE_CHANGED: Row(phase=Phase.COOLDOWN, actions=_IMAGE),
    },
}
"""Transitions by phase."""

_CANARY_EVENTS = frozenset(
    (
        EventKind.CANARY_BETTER,
        EventKind.CANARY_BETTER_MANUAL,
        EventKind.CANARY_WORSE,
        EventKind.CANARY_UNDECIDED,
        EventKind.CANARY_POD_LOST,
        EventKind.CANARY_FAILED,
    )
)
_JOB_EVENTS = frozenset(
    (
        EventKind.JOB_BETTER,
        EventKind.JOB_BETTER_DIRECT,
        EventKind.JOB_NOT_BETTER,
        EventKind.JOB_FAILED,
        EventKind.JOB_LOST,
    )
)
_CAPTURE_EVENTS = frozenset((EventKind.CAPTURES_READY, EventKind.CAPTURES_POISONED))
_COMMANDS = frozenset((EventKind.USER_PROMOTE, EventKind.USER_REJECT))
_BUSY = frozenset((EventKind.RUN_REQUESTED, EventKind.USER_CANDIDATE))
"""Requests that a run in progress ignores."""
_ROLLOUT = frozenset((EventKind.CONVERGED, EventKind.LOAD_REFUSED))

IGNORED: Mapping[Phase, frozenset[EventKind]] = {
    Phase.SERVING: _CANARY_EVENTS | _JOB_EVENTS | _CAPTURE_EVENTS | _COMMANDS | _ROLLOUT | {EventKind.TIME_OVER},
    Phase.COLLECTING: _CANARY_EVENTS | _JOB_EVENTS | _BUSY | _ROLLOUT | {EventKind.USER_PROMOTE},
    Phase.DISTILLING: _CANARY_EVENTS | _BUSY | _ROLLOUT | {EventKind.CAPTURES_READY, EventKind.USER_PROMOTE},
    Phase.CANARY: _JOB_EVENTS | _CAPTURE_EVENTS | _BUSY | {EventKind.CONVERGED},
    Phase.PROMOTING: _CANARY_EVENTS | _JOB_EVENTS | _CAPTURE_EVENTS | _BUSY | {EventKind.USER_PROMOTE},
    Phase.ROLLING_BACK: _CANARY_EVENTS | _JOB_EVENTS | _CAPTURE_EVENTS | _BUSY | _COMMANDS | {EventKind.USER_ROLLBACK},
    Phase.COOLDOWN: _CANARY_EVENTS | _JOB_EVENTS | _CAPTURE_EVENTS | _COMMANDS | _ROLLOUT,
}
"""Events that come too late for a phase, or that it refuses. They change nothing."""
