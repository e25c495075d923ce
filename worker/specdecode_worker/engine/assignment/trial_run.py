"""Trial of a candidate on one worker: the two drafts, the block that runs, and the state for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdecode_worker.contract import DraftTrial, TrialState
from specdecode_worker.engine.assignment.assigned_draft import DraftGoal
from specdecode_worker.speculation.draft_trial import TrialSchedule
from specdecode_worker.speculation.trial_costs import BlockCosts

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.loaded_draft import LoadedDraft


@dataclass(slots=True)
class TrialRun:
    """Trial that this worker was assigned, until the plan assigns it another one or none."""

    schedule: TrialSchedule
    stable: DraftGoal
    """Incumbent, which runs before and after the trial."""
    incumbent: LoadedDraft | None = None
    candidate: LoadedDraft | None = None
    block: BlockCosts | None = None
    """Block that runs; None before the first one, and once the trial has failed."""
    problem: str = ""
    """Reason why the trial has failed; empty if it has not."""

    def is_same(self, trial: DraftTrial | None, stable: DraftGoal) -> bool:
        """Return whether an assignment goes on with this trial."""
        own = self.schedule.trial
        return trial is not None and (trial.id, trial.candidate, stable) == (own.id, own.candidate, self.stable)

    @property
    def is_loading(self) -> bool:
        """True until the first block begins."""
        return self.block is None and not self.problem

    @property
    def next_draft(self) -> LoadedDraft:
        """Draft of the next or running block."""
        draft = self.candidate if self.schedule.is_candidates_turn else self.incumbent
        assert draft is not None, "both are loaded before the first block"
        return draft

    @property
    def loaded(self) -> tuple[LoadedDraft, ...]:
        """Drafts that the trial holds, the incumbent first."""
        return tuple(draft for draft in (self.incumbent, self.candidate) if draft is not None)

    def fail(self, problem: str) -> None:
        """End the trial for a reason and let go of both drafts."""
        self.problem = problem or "unknown reason"
        self.block = self.incumbent = self.candidate = None

    def state(self) -> TrialState:
        """Return the state for the report."""
        schedule = self.schedule
        return TrialState(
            id=schedule.trial.id,
            state="Failed" if self.problem else "Loading" if self.block is None else "Running",
            pair=schedule.pair,
            pairs=schedule.pairs,
            problem=self.problem[:1000] or None,
        )
