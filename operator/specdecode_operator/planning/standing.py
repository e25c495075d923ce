"""Whether a choice of rows stands, so that nobody need weigh the loads again. Pure.

A deployment at rest is looked at as often as any other, and weighing its loads would be most of such a look. While
nothing has changed that its rows were chosen by, only time can move one: a dwell, a patience or an hour that is over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.look import GROWTH, HOUR_SECONDS
from specdecode_operator.planning.rows import SWEEP_SECONDS, Chosen
from specdecode_operator.planning.trials import BUSY_SECONDS, FRESH_SECONDS
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.state.session import Standing

BESIDE = {
    "swept_at",
    "history",
    "following",
    "pods",
    "forecast",
    "scaling",
    "startup_seconds",
    "recycled_at",
    "recycling",
    "parked",
    "saved_device_seconds",
    "revisions",
}
"""Fields of the state that no row depends on; some of them change with every poll."""
MARGIN_SECONDS = 0.01
"""Before a wait is over rows are chosen anew: no rounding of times shall make one late."""


def basis_of(speculation: SpeculationSpec, learned: LearnedState, *others: object) -> bytes:
    """Digest of all that a choice is made from but the time."""
    found = hashlib.blake2b(learned.model_dump_json(exclude=BESIDE).encode(), digest_size=16)
    found.update(speculation.model_dump_json().encode())
    found.update(repr(others).encode())
    return found.digest()


def stands(known: Standing | None, basis: bytes, now: float) -> bool:
    return known is not None and known.basis == basis and known.since <= now < known.until


def standing(
    speculation: SpeculationSpec, learned: LearnedState, chosen: Chosen, basis: bytes, now: float
) -> Standing | None:
    """Return how long ``chosen`` holds, if it covered all loads and left every row as it was. A shape that runs to be
    measured waits for more than a time."""
    measured = any(row.trial or row.probing for row in learned.rows)
    if measured or chosen.swept_at != now or chosen.changes or chosen.rows != learned.rows:
        return None
    ahead = (at for at in _waits(speculation, learned) if at >= now - MARGIN_SECONDS)
    return Standing(basis=basis, since=now, until=min(ahead, default=math.inf) - MARGIN_SECONDS)


def still(learned: LearnedState, now: float) -> Chosen:
    """The rows as they are; ``choose`` would have looked at all loads as often as ever."""
    swept_at = learned.swept_at if 0 <= now - learned.swept_at < SWEEP_SECONDS else now
    return Chosen(rows=learned.rows, swept_at=swept_at)


def _waits(speculation: SpeculationSpec, learned: LearnedState) -> Iterator[float]:
    """Every time at which something may be allowed, or seen, that was not before."""
    yield learned.load.at + BUSY_SECONDS
    for cell in learned.costs:
        yield cell.at + FRESH_SECONDS
    for row in learned.rows:
        yield from _waits_of(row, float(speculation.hysteresis.min_dwell_seconds))


def _waits_of(row: RowState, dwell: float) -> Iterator[float]:
    yield row.off_until
    yield row.no_trial_until
    for count, at in enumerate((*row.moves, 0.0)):
        yield at + HOUR_SECONDS
        yield row.since + dwell * GROWTH**count
