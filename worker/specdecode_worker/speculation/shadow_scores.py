"""Shadow scores: drafted tokens beyond the verified tree, scored against the tokens that are emitted later.

The target's tokens do not depend on the draft, so a path that was never verified gives the same information as one that
was.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.contract import MAX_RANKS


@dataclass(frozen=True, slots=True)
class ShadowDraft:
    """Main path drafted after the token at index ``root``.

    ``ranked[d]`` holds the draft's best tokens for index root + 1 + d, drafted on the assumption that ``ranked[e][0]``
    was emitted at every e < d. Depths up to ``verified`` are counted at acceptance and not here.
    """

    root: int
    ranked: tuple[tuple[int, ...], ...]
    verified: int
    depth_limit: int
    """Synthetic limit on accepted depth: every score at a larger depth is a miss or is not reached."""


@dataclass(frozen=True, slots=True)
class Score:
    """Depth (from 1) and rank (MAX_RANKS for a miss) of one token."""

    depth: int
    rank: int


def scores(shadow: ShadowDraft, tokens: list[int]) -> list[Score] | None:
    """Return the scores of the depths beyond the verified ones, up to and including the first wrong token.

    Return None while too few tokens have been emitted to know them.
    """
    depth_scores: list[Score] = []
    for level, ranked in enumerate(shadow.ranked):
        index = shadow.root + 1 + level
        if index >= len(tokens):
            return None
        rank = ranked.index(tokens[index]) if tokens[index] in ranked else MAX_RANKS
        rank = MAX_RANKS if level >= shadow.depth_limit else rank
        if level >= shadow.verified:
            depth_scores.append(Score(level + 1, rank))
        if rank != 0:
            break
    return depth_scores
