"""Shadow scores: what was drafted beyond the verified tree, scored against the tokens that come out later.

The target's tokens do not depend on the draft, so a path that was never verified teaches as much as one that was.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.contract import MAX_RANKS


@dataclass(frozen=True, slots=True)
class Shadow:
    """The main path drafted behind index ``root``: ``ranked[d]`` are the best tokens for index root + 1 + d, drafted
    as if ``ranked[e][0]`` had come out at every e < d. Depths up to ``verified`` are counted by the walk itself."""

    root: int
    ranked: tuple[tuple[int, ...], ...]
    verified: int
    kept_depth: int
    """A synthetic cut: deeper than this every score is a miss or is not reached."""


@dataclass(frozen=True, slots=True)
class Score:
    """Depth (from 1) and rank (MAX_RANKS for a miss) of one token."""

    depth: int
    rank: int


def scores(shadow: Shadow, tokens: list[int]) -> list[Score] | None:
    """Scores beyond the verified depths, or None while too few tokens have come out to tell."""
    found: list[Score] = []
    for level, ranked in enumerate(shadow.ranked):
        index = shadow.root + 1 + level
        if index >= len(tokens):
            return None
        rank = ranked.index(tokens[index]) if tokens[index] in ranked else MAX_RANKS
        rank = MAX_RANKS if level >= shadow.kept_depth else rank
        if level >= shadow.verified:
            found.append(Score(level + 1, rank))
        if rank != 0:
            break
    return found
