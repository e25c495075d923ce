"""Draft that was loaded, or that cannot run, and the interface of what loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdecode_worker.contract import DraftConfig, DraftState
from specdecode_worker.engine.drafts.drafter import Drafter

DEFAULT_DRAFT = ""
"""Name of the default draft, used by tasks that have no draft of their own."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Draft that can run, and its state for the worker report."""

    drafter: Drafter
    state: DraftState


@dataclass(frozen=True, slots=True)
class UnusableDraft:
    """Configured draft that cannot run; its state holds the reason."""

    state: DraftState


class LoadDraft(Protocol):
    """Callable that loads a draft while others run; see DraftLoader."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load the draft of ``config`` under ``name``. Raise ModelError on failure."""
        ...
