"""Estimates of drafts, parked and restored in the learned state. Pure.

Estimates belong to a draft. When the current draft changes, those of the old draft are parked, and those of the new
draft are restored if they are known, so that a rollback or a canary loses nothing.
"""

from __future__ import annotations

from specdecode_operator.state import cells as stored
from specdecode_operator.state.cells import StepTimeCell
from specdecode_operator.state.learned import MAX_PARKED_DRAFTS, LearnedState
from specdecode_operator.telemetry.counters import CellKey


def with_parked(learned: LearnedState, estimates: stored.DraftEstimates) -> LearnedState:
    """Return ``learned`` with these estimates as those of the most recently used parked draft."""
    others = (parked for parked in learned.parked if parked.draft != estimates.draft)
    return learned.model_copy(update={"parked": (estimates, *others)[:MAX_PARKED_DRAFTS]})


def parked_of(learned: LearnedState, draft: str) -> stored.DraftEstimates:
    """Return the parked estimates of a draft; empty ones if there are none."""
    return next((parked for parked in learned.parked if parked.draft == draft), stored.DraftEstimates(draft=draft))


def with_draft(learned: LearnedState, draft: str) -> LearnedState:
    """Return ``learned`` with ``draft`` as the current draft: restored if it is parked, else from nothing.

    Step times without draft passes stay. After a pause, tests for change points and hourly limits begin again.
    """
    new, learned = parked_of(learned, draft), _with_old_parked(learned)
    return _with_current(learned, draft, new.rows, new)


def with_promoted_draft(learned: LearnedState, draft: str) -> LearnedState:
    """Return ``learned`` with ``draft`` as the current draft, which takes over what was learnt with the old one.

    Rows and step times move to the new hash, because both drafts have the same shapes. What was measured with the new
    draft itself goes before. A draft that had rows of its own, such as after a rollback, gets these back.
    """
    new = parked_of(learned, draft)
    if new.rows:
        return with_draft(learned, draft)
    costs = {CellKey.of(cell): cell for cell in (*learned.costs, *new.costs)}
    taken = stored.DraftEstimates(
        draft=draft,
        acceptance=new.acceptance or learned.acceptance,
        requests=new.requests or learned.requests,
        costs=tuple(cell for cell in costs.values() if cell.draft_passes),
    )
    return _with_current(_with_old_parked(learned), draft, learned.rows, taken)


def _with_old_parked(learned: LearnedState) -> LearnedState:
    again = {"changed_at": 0.0}
    old = stored.DraftEstimates(
        draft=learned.draft,
        acceptance=tuple(c.model_copy(update={**again, "new_hits": 0.0, "new_total": 0.0}) for c in learned.acceptance),
        requests=learned.requests,
        costs=tuple(c.model_copy(update={**again, "new_values": ()}) for c in learned.costs if c.draft_passes),
        rows=tuple(row.model_copy(update={"moves": ()}) for row in learned.rows),
    )
    if old.draft and (old.acceptance or old.requests or old.costs or old.rows):
        return with_parked(learned, old)
    return learned


def _with_current(
    learned: LearnedState, draft: str, rows: tuple[stored.RowState, ...], new: stored.DraftEstimates
) -> LearnedState:
    plain: tuple[StepTimeCell, ...] = tuple(cell for cell in learned.costs if not cell.draft_passes)
    return learned.model_copy(
        update={
            "draft": draft,
            "rows": rows,
            "acceptance": new.acceptance,
            "requests": new.requests,
            "costs": tuple(sorted((*plain, *new.costs), key=CellKey.of)),
            "parked": tuple(parked for parked in learned.parked if parked.draft != draft),
        }
    )
