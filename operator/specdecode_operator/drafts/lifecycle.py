"""State machine of a deployment's drafts, as a pure function: `advance(state, event) -> Transition`.

The table is in `lifecycle_table`. The caller stores the new state before it carries out the actions. Every action is
idempotent, and `required_actions` lists those that a phase needs, so that an operator that was killed between the two
goes on from the stored state and from what is true in the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdecode_operator.drafts.lifecycle_table import (
    ALWAYS,
    PHASE_ACTIONS,
    PHASES,
    Action,
    EventKind,
    Mode,
    Phase,
    Row,
)

FAILURE_LIMIT = 3
"""Losses of the canary pod after which the candidate is rolled back (spec: failureLimit)."""


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
    failure_limit: int = FAILURE_LIMIT
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """Next state, and the actions to carry out once it is stored."""

    state: Lifecycle
    actions: tuple[Action, ...] = ()


def advance(state: Lifecycle, event: Event) -> Transition:
    """Return the next state and its actions. Every event is defined in every phase; late ones change nothing."""
    if event.kind is EventKind.PAUSED:
        return Transition(replace(state, paused=True))
    if event.kind is EventKind.RESUMED:
        resumed = replace(state, paused=False)
        return Transition(resumed, required_actions(resumed))
    if state.paused:
        # Events follow from the cluster and the spec, so what still holds comes again after the pause.
        return Transition(state)
    kind = _effective_kind(state, event.kind)
    row = ALWAYS.get(kind) or PHASES[state.phase].get(kind)
    if row is None or not _is_allowed(state, row, event):
        return Transition(state)
    return _apply(state, row, event)


def required_actions(state: Lifecycle) -> tuple[Action, ...]:
    """Return the actions that the phase needs, to be repeated after a restart. A paused deployment needs none."""
    return () if state.paused else PHASE_ACTIONS[state.phase]


def _effective_kind(state: Lifecycle, kind: EventKind) -> EventKind:
    """Return the event that counts, where it depends on the mode or on earlier losses."""
    if kind is EventKind.CANARY_POD_LOST and state.canary_losses + 1 >= state.failure_limit:
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


def _apply(state: Lifecycle, row: Row, event: Event) -> Transition:
    """Return the transition of a row: its own actions, then those of a newly entered phase."""
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
        after = replace(after, current=state.previous or "", previous=None)
    if row.sets_current:
        after = replace(after, current=event.draft, previous=None)
    if row.drops_candidate:
        after = replace(after, candidate="", canary_losses=0, is_confirmed=False)
    entered = PHASE_ACTIONS[row.phase] if row.phase is not state.phase else ()
    return Transition(after, (*row.actions, *(action for action in entered if action not in row.actions)))
