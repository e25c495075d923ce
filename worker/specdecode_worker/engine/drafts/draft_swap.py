"""Swaps of drafts: the new one loads in a thread beside the steps, is looked over, and waits to be taken in.

The engine loop asks `finished` between two steps and lets the engine take over what has loaded; a draft that does not
fit changes nothing and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError

if TYPE_CHECKING:  # the server's process imports this module's neighbours, and no torch
    from specdecode_worker.engine.drafts.draft_registry import LoadDraft, LoadedDraft

POLL_SECONDS = 0.05
"""How often an idle loop asks whether a draft has loaded."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A draft that has loaded under a name, or the reason why it has not."""

    call_id: int
    name: str
    loaded: LoadedDraft | None
    problem: str = ""


class Swaps:
    """Loads one draft after the other; nothing that runs is touched."""

    def __init__(self, load: LoadDraft | None) -> None:
        self._load = load
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: list[tuple[SetDraft, Future[LoadedDraft]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._under_way)

    def begin(self, message: SetDraft) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._under_way.append((message, self._worker.submit(self._loaded, message)))

    def finished(self) -> Iterator[Swap]:
        """Those that are done, in the order in which they were asked for."""
        while self._under_way and self._under_way[0][1].done():
            message, future = self._under_way.pop(0)
            error = future.exception()
            if error is None:
                yield Swap(message.call_id, message.name, future.result())
            elif isinstance(error, ModelError | ValidationError):
                yield Swap(message.call_id, message.name, None, str(error))
            else:
                raise error

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _loaded(self, message: SetDraft) -> LoadedDraft:
        if self._load is None:
            raise ModelError("this engine cannot load a draft while it runs")
        config = DraftConfig.model_validate_json(message.draft_json)
        if config.method == "none":
            raise ModelError("method none is no draft; to stop speculating, send a plan without depth")
        return self._load(config, message.name)
