"""Estimate the acceptance of a task with fewer of its merged drafts, from the credit of each draft. Pure.

The rates of the task's own draft alone are those of its credit. The gain of merging is shared among the merged drafts
by their credit, so that the rates of all drafts together are the measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_operator.merging.credit import COMMON, Counts, Place, counts_of
from specdecode_operator.merging.tuning import TUNING
from specdecode_operator.planning.acceptance_model import design_effect, task_acceptance
from specdecode_operator.planning.draft_trees import Position, TaskAcceptance
from specdecode_operator.state.learned import AcceptanceCell, LearnedState
from specdecode_operator.telemetry.counters import NO_HITS, Hits

Names = tuple[str, ...]
"""Names of merged drafts, in the order of the spec."""


@dataclass(frozen=True, slots=True)
class TaskDrafts:
    """Drafts of one task: hashes by name, and where they extend the tree without draft passes."""

    task: str
    own_hash: str
    hashes: Mapping[str, str]
    """Hashes of the declared drafts, by name; empty where no worker reported it."""
    extensions: Mapping[str, int] = field(default_factory=dict)
    """Depth to which a draft without passes extends the main path, by name; absent for 0."""
    has_passes: bool = True
    """True if the task's own draft has passes. It then proposes at every node of the planned tree."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Measured counts of one task with its ``running`` drafts."""

    drafts: TaskDrafts
    running: Names
    common: Counts
    own: Counts
    merged: Mapping[str, Counts]
    """By name."""
    effect: float
    """Design effect: so many drafts of one request count as one."""

    @classmethod
    def of(cls, learned: LearnedState, drafts: TaskDrafts, running: Names) -> Credit:
        """Return the credit that the state has for a task."""
        return cls(
            drafts,
            running,
            counts_of(learned, drafts.task, COMMON),
            counts_of(learned, drafts.task, drafts.own_hash) if drafts.own_hash else {},
            {n: counts_of(learned, drafts.task, drafts.hashes[n]) if drafts.hashes.get(n) else {} for n in running},
            design_effect(learned, drafts.task),
        )

    @property
    def is_measured(self) -> bool:
        """True if enough independent drafts are known, in the own order and in the common one."""
        first = [counts.get((1, "main"), NO_HITS).total for counts in (self.common, self.own)]
        return min(first) / self.effect >= TUNING.least_drafts

    def share_of_accepted(self, names: Names) -> float:
        """Return the share of the accepted tokens that drafts proposed first; tokens of several count once at most."""
        accepted = sum(hits.hits + sum(hits.ranks) for hits in self.common.values())
        credited = sum(hits.hits for name in names for hits in self.merged[name].values())
        return min(1.0, credited / accepted) if accepted > 0 else 0.0

    # --- fewer drafts ---------------------------------------------------------------------------------------------

    def acceptance(self, learned: LearnedState, names: Names, depth: int, top_k: int) -> TaskAcceptance:
        """Return the acceptance of the task with the drafts ``names``, which are among the running ones."""
        return task_acceptance(self.with_counts(learned, names), self.drafts.task, depth, top_k)

    def with_counts(self, learned: LearnedState, names: Names) -> LearnedState:
        """Return the state as if the task's counts were those with the drafts ``names``."""
        task = self.drafts.task
        counts = {place: hits for place in self.common if (hits := self._counts(place, names)) is not None}
        at = max((cell.at for cell in learned.credit if cell.task == task), default=0.0)
        cells = [
            AcceptanceCell(
                task=task, depth=depth, parent=parent, hits=hits.hits, total=hits.total, ranks=hits.ranks, at=at
            )
            for (depth, parent), hits in sorted(counts.items())
        ]
        others = (cell for cell in learned.acceptance if cell.task != task)
        both = sorted((*others, *cells), key=lambda cell: (cell.task, cell.depth, cell.parent))
        return learned.model_copy(update={"acceptance": tuple(both)})

    def error(self, names: Names, acceptance: TaskAcceptance) -> dict[Position, float]:
        """Return the variance of the differences between the running rates and those with the drafts ``names``.

        Both rates are measured at the same nodes, so only nodes at which one of them alone was right differ. Without
        the dropped drafts, a node can be lost only where one of these was right.
        """
        variances: dict[Position, float] = {}
        for depth, ranks in enumerate(acceptance.main, start=1):
            hits = self.common.get((depth, "main"), NO_HITS)
            if hits.total >= 1:
                before, after = min(1.0, hits.hits / hits.total), ranks[0].mean
                loss = before - after
                dropped = [
                    self.merged[name].get((depth, "main"), NO_HITS) for name in self.running if name not in names
                ]
                credit = sum(one.hits + sum(one.ranks) for one in dropped) + TUNING.half_count
                lost = min(credit / (hits.total + 1), before, 1 - after)
                apart = before * (1 - after) + after * (1 - before)
                differing = max(abs(loss), min(apart, 2 * max(0.0, lost) - loss))
                variances[depth, True, 0] = max(0.0, differing - loss**2) * self.effect / hits.total
        return variances

    def _counts(self, place: Place, names: Names) -> Hits | None:
        """Return the counts at one place with the drafts ``names``; None where none of them proposes."""
        common, own = self.common[place], self.own.get(place, NO_HITS)
        if names == self.running:
            return common
        credits = {name: self.merged[name].get(place, NO_HITS).hits for name in self.running}
        total = sum(credits.values()) + TUNING.half_count * len(credits)
        share = sum(credits[name] + TUNING.half_count for name in names) / total if names else 0.0
        if own.total < 1:
            return common.times(share) if names else None
        # A lookup proposes nothing at some nodes; without it, these are no part of its counts.
        alone = own.times(common.total / (own.total if self.drafts.has_passes else max(own.total, common.total)))
        mixed = alone.times(1 - share).plus(common.times(share))
        return Hits(min(mixed.hits, common.total), common.total, mixed.ranks)

    # --- extensions of the main path ------------------------------------------------------------------------------

    def extension(self, names: Names, depth: int, survival: float) -> tuple[float, float]:
        """Return the tokens and the nodes that drafts without passes add to a main path of ``depth`` in a step.

        Args:
            names: Merged drafts.
            depth: Depth of the planned main path; at 0 nothing is extended.
            survival: Probability that the whole planned path is accepted.
        """
        reach = {name: most for name in names if (most := self.drafts.extensions.get(name, 0)) > depth > 0}
        if not reach:
            return 0.0, 0.0
        first = self.common.get((1, "main"), NO_HITS).total
        proposed = sum(self.merged[name].get((1, "main"), NO_HITS).total for name in reach)
        nodes = min(1.0, proposed / first) * (max(reach.values()) - depth) if first > 0 else 0.0
        tokens, alive = 0.0, survival
        for level in range(depth + 1, max(reach.values()) + 1):
            alive *= max(self._extended(name, level) for name in reach if reach[name] >= level)
            tokens += alive
        return tokens, nodes

    def _extended(self, name: str, level: int) -> float:
        """Return the probability that a draft proposes the next token of the main path, and is right."""
        parents = self.common.get((level - 1, "main"), NO_HITS).hits
        hits = self.merged[name].get((level, "main"), NO_HITS).hits
        return min(1.0, hits / parents) if parents >= 1 else 0.0


def subsets_of(running: Sequence[str]) -> list[Names]:
    """Return all subsets of the drafts that run, in their order, the largest first."""
    count = len(running)
    masks = sorted(range(1 << count), key=lambda mask: (-mask.bit_count(), mask))
    return [tuple(name for index, name in enumerate(running) if mask >> index & 1) for mask in masks]
