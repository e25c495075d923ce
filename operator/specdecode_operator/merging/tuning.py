"""Constants of the choice of merged drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MergeTuning:
    """Constants of the credit and of the choice. "Trade" marks a value between two costs; none was measured."""

    carried_drafts: float = 60.0
    """Drafts that an acceptance counts for after the drafts of its task changed: enough for rows of its own (50), and
    a fifth of what a change point needs to be outweighed by in a minute of traffic. Trade."""
    max_cells: int = 384
    """Stored credit cells: three tasks with four orders (common, own, two merged), 16 depths, two kinds of parents."""
    least_drafts: float = 20.0
    """Independent drafts of a task below which nothing is chosen: as many as outweigh a prior of acceptance twice."""
    half_count: float = 0.5
    """Pseudo-count of a share of drafts, so that no event is held to be impossible (Jeffreys)."""


TUNING = MergeTuning()
