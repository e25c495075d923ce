"""Draft swaps: loading of a new draft in a thread while the engine runs steps.

The engine loop calls `DraftSwapQueue.finished` between two steps and passes the loaded drafts to the engine. A draft
that does not fit the target changes nothing; its swap holds the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.errors import is_sticky_device_error
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.draft_registry import LoadDraft, LoadedDraft

POLL_SECONDS = 0.05
"""Interval at which an idle engine loop checks for a loaded draft, in seconds."""


@dataclass(frozen=True, slots=True)
class DraftSwap:
    """Finished swap of the draft called ``name``. ``loaded`` is None on failure; ``problem`` is the reason."""

    call_id: int
    name: str
    loaded: LoadedDraft | None
    problem: str = ""


class DraftSwapQueue:
    """Queue of draft swaps. One thread loads the drafts one by one, without effect on drafts in use."""

    def __init__(self, load: LoadDraft | None) -> None:
        self._load = load
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[tuple[SetDraft, Future[LoadedDraft]]] = []

    @property
    def pending(self) -> bool:
        """True if a draft is loading or waits to be taken over."""
        return bool(self._pending)

    def begin(self, message: SetDraft) -> None:
        """Start or queue the loading of a draft."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._pending.append((message, self._worker.submit(self._loaded, message)))

    def finished(self) -> Iterator[DraftSwap]:
        """Yield the finished swaps in the order of their requests. Unexpected errors of the loader are raised."""
        while self._pending and self._pending[0][1].done():
            message, future = self._pending.pop(0)
            error = future.exception()
            if error is None:
                yield DraftSwap(message.call_id, message.name, future.result())
            elif is_sticky_device_error(error):
                raise error
            elif isinstance(error, ModelError | ValidationError):
                yield DraftSwap(message.call_id, message.name, None, str(error))
            else:
                raise error

    def close(self) -> None:
        """Cancel queued swaps, without waiting for the one that is loading."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _loaded(self, message: SetDraft) -> LoadedDraft:
        if self._load is None:
            raise ModelError("this engine cannot load a draft while it runs")
        config = DraftConfig.model_validate_json(message.draft_json)
        if config.method == "none":
            raise ModelError("method none is no draft; to stop speculating, send a plan without depth")
        return self._load(config, message.name)
