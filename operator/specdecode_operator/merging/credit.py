"""Credit of each draft in the trees of tasks that merge drafts: decayed counts, and what they say of fewer drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from specdecode_operator.merging.tuning import TUNING
from specdecode_operator.planning import learning
from specdecode_operator.state.learned import AcceptanceCell, CreditCell, LearnedState, rounded
from specdecode_operator.telemetry.counters import Delta, Hits

COMMON = ""
"""Place of a draft's hash in the counts of the common order, taken at the same nodes as the credit."""
Place = tuple[int, Literal["main", "sibling"]]
"""Depth, and parent."""
Counts = Mapping[Place, Hits]


def learn_credit(learned: LearnedState, delta: Delta | None, tasks: Collection[str], now: float) -> LearnedState:
    """Return the state with the credit of one poll added; only that of ``tasks`` stays.

    Credit is forgotten, and outdated by change points, in the same way as acceptance.
    """
    known = [cell for cell in learned.credit if cell.task in tasks]
    if delta is None or not delta.credit:
        return _with_credit(learned, known)
    fresh = {key: hits for key, hits in delta.credit.items() if key[0] in tasks}
    merging = {key[0] for key in fresh}
    for (task, depth), hits in delta.acceptance.items():
        fresh |= {(task, COMMON, depth, "main"): hits} if task in merging else {}
    for (task, depth), hits in delta.siblings.items():
        fresh |= {(task, COMMON, depth, "sibling"): hits} if task in merging else {}
    cells: list[CreditCell] = []
    for draft in sorted({cell.draft for cell in known} | {key[1] for key in fresh}):
        own = LearnedState(acceptance=tuple(c for c in known if c.draft == draft), requests=learned.requests)
        counts = {key: hits for key, hits in fresh.items() if key[1] == draft}
        moved = learning.learn(own, _as_acceptance(counts, delta.seconds), now=now).acceptance
        cells += [CreditCell(**{**dict(cell), "draft": draft}) for cell in moved]
    return _with_credit(learned, cells)


def own_acceptance(delta: Delta, draft: str) -> Delta:
    """Return the poll with the acceptance of ``draft`` on its own, in tasks that merged other drafts with it."""
    credited = {key: hits for key, hits in delta.credit.items() if key[1] == draft}
    if not credited:
        return delta
    tasks, own = {key[0] for key in credited}, _as_acceptance(credited, delta.seconds)
    rest = {key: hits for key, hits in delta.acceptance.items() if key[0] not in tasks}
    siblings = {key: hits for key, hits in delta.siblings.items() if key[0] not in tasks}
    return replace(delta, acceptance={**rest, **own.acceptance}, siblings={**siblings, **own.siblings})


def counts_of(learned: LearnedState, task: str, draft: str) -> Counts:
    """Return the counts of a draft, or of the common order, in one task."""
    return {
        (cell.depth, cell.parent): Hits(cell.hits, cell.total, cell.ranks)
        for cell in learned.credit
        if (cell.task, cell.draft) == (task, draft)
    }


def without_task(learned: LearnedState, task: str) -> LearnedState:
    """Return the state without the credit of one task, which is then measured again."""
    return _with_credit(learned, [cell for cell in learned.credit if cell.task != task])


def carried(learned: LearnedState, task: str, now: float) -> LearnedState:
    """Return the state after the drafts of a task changed: its acceptance is an estimate, and counts for few drafts.

    It is a change point: rows that were chosen by the evidence before have no claim against others, and what is
    measured from now on outweighs the estimate within a minute of traffic. The credit is measured again.
    """
    cells = (_carried(cell, now) if cell.task == task else cell for cell in learned.acceptance)
    return without_task(learned.model_copy(update={"acceptance": tuple(cells)}), task)


def _carried(cell: AcceptanceCell, now: float) -> AcceptanceCell:
    share = min(1.0, TUNING.carried_drafts / cell.total) if cell.total > 0 else 1.0
    counts = {"hits": rounded(cell.hits * share), "total": rounded(cell.total * share)}
    ranks = tuple(rounded(count * share) for count in cell.ranks)
    marks = {"new_hits": 0.0, "new_total": 0.0, "at": now, "changed_at": now}
    return cell.model_copy(update={**counts, **marks, "ranks": ranks})


def _as_acceptance(counts: Mapping[tuple[str, str, int, Literal["main", "sibling"]], Hits], seconds: float) -> Delta:
    return Delta(
        seconds=seconds,
        acceptance={(task, depth): hits for (task, _, depth, parent), hits in counts.items() if parent == "main"},
        siblings={(task, depth): hits for (task, _, depth, parent), hits in counts.items() if parent == "sibling"},
    )


def _with_credit(learned: LearnedState, cells: Iterable[CreditCell]) -> LearnedState:
    """Return the state with at most ``max_cells`` cells, those of the highest counts among the latest."""
    by_use = sorted(cells, key=lambda cell: (-cell.at, -cell.total, cell.task, cell.draft, cell.depth, cell.parent))
    most = sorted(by_use[: TUNING.max_cells], key=lambda cell: (cell.task, cell.draft, cell.depth, cell.parent))
    return learned if tuple(most) == learned.credit else learned.model_copy(update={"credit": tuple(most)})
