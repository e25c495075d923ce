"""Default draft of an engine as the follower of the assignment sees it: what runs, what loads, how it is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from specdecode_worker.contract import DraftState
from specdecode_worker.engine.assignment.assigned_draft import DraftGoal
from specdecode_worker.engine.drafts.draft_swap import DraftSwapQueue
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.speculation.trial_costs import BlockCosts

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.loaded_draft import LoadedDraft

_NAME = ""


class FollowedEngine(Protocol):
    """Part of an engine that the follower needs."""

    @property
    def draft(self) -> DraftState:
        """State of the default draft."""
        ...

    def loaded_draft(self) -> LoadedDraft | None:
        """Return the default draft, or None if it is not loaded."""
        ...

    def set_block(self, block: BlockCosts | None) -> None:
        """Begin a block of a trial; None ends the trial."""
        ...


class DefaultDraft:
    """Default draft of one engine. Methods that can fail return the reason, which the report then shows too."""

    def __init__(self, engine: FollowedEngine, swaps: DraftSwapQueue, install: Callable[[LoadedDraft], None]) -> None:
        """Create the access to the draft.

        Args:
            engine: Engine that runs the draft.
            swaps: Queue that loads drafts.
            install: Function that passes a loaded draft to the engine. It raises ModelError if that fails.
        """
        self._engine, self._swaps, self._install = engine, swaps, install

    @property
    def state(self) -> DraftState:
        """State of the draft that runs, or that could not be loaded at start."""
        return self._engine.draft

    @property
    def loaded(self) -> LoadedDraft | None:
        """Draft that runs, or None."""
        return self._engine.loaded_draft()

    def is_replaced(self, goal: DraftGoal) -> bool:
        """Return whether another draft than ``goal`` is loading."""
        pending = self._swaps.pending_draft(_NAME)
        return pending is not None and (pending.hash, pending.uri) != (goal.hash, goal.config.uri or "")

    def begin(self, goal: DraftGoal) -> str:
        """Start to load a draft. It replaces one that is loading. Return the reason if that cannot be tried."""
        draft_json = goal.config.model_dump_json(exclude={"name"}).encode()
        try:
            self._swaps.begin(SetDraft(0, draft_json, _NAME, goal.hash))
        except ModelError as error:
            return self.record_problem(str(error))
        return ""

    def cancel(self) -> None:
        """Discard the draft that is loading, if there is one."""
        self._swaps.cancel(_NAME)

    def install(self, loaded: LoadedDraft) -> str:
        """Pass a loaded draft to the engine. Return the reason if it cannot be used; nothing has changed then."""
        try:
            self._install(loaded)
        except ModelError as error:
            return self.record_problem(str(error))
        return ""

    def record_problem(self, problem: str) -> str:
        """Show a problem in the report, and return it."""
        self._swaps.record_problem(_NAME, problem)
        return problem

    def set_block(self, block: BlockCosts | None) -> None:
        """Begin a block of a trial; None ends the trial."""
        self._engine.set_block(block)
