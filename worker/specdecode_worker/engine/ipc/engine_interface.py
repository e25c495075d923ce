"""Interface of the engine that the loop of the engine process drives, and of the function that builds one.

The server process imports this module, so it must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from specdecode_worker.contract import Plan, Report, SyntheticKnobs, TrialState, WorkerConfig
from specdecode_worker.engine.assignment.default_draft import FollowedEngine
from specdecode_worker.engine.drafts.draft_swap import SwapStatus
from specdecode_worker.engine.ipc.messages import Loaded, Tokens
from specdecode_worker.engine.stats.step_time_calibration import CalibrationTarget

if TYPE_CHECKING:
    from specdecode_worker.engine.drafts.loaded_draft import LoadDraft, LoadedDraft


class Engine(CalibrationTarget, FollowedEngine, Protocol):
    """Interface of the engine that the loop drives; ``engine.engine.Engine`` implements it."""

    on_launch: Callable[[int, int], None] | None
    """Called with the numbers of rows and prefill tokens of each step that is launched."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute until the next message."""
        ...

    def report(self, swaps: Mapping[str, SwapStatus] = ..., trial: TrialState | None = ...) -> Report:
        """Return the worker report, with the swaps of drafts by name and the draft trial."""
        ...

    @property
    def draft_names(self) -> Sequence[str]:
        """Names of the drafts, loaded or not; empty for the default draft."""
        ...

    def set_plan(self, plan: Plan) -> None:
        """Replace the plan. Raise ValueError if the engine refuses it."""
        ...

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Replace the synthetic knobs; None clears them."""
        ...

    @property
    def load_draft(self) -> LoadDraft | None:
        """Callable that loads a draft in another thread while the engine runs; None if no draft can be loaded."""
        ...

    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Replace the draft of this name. Return the tokens of the steps that were in flight.

        Raises:
            ModelError: The draft cannot be used; nothing has changed.
        """
        ...


Build = Callable[[WorkerConfig], tuple[Engine, Loaded]]
"""Callable that loads the models. It runs in the engine process, which may import torch."""
