"""Draft swaps: loading of a new draft in a thread while the engine runs steps.

The engine loop calls `DraftSwapQueue.finished` between two steps and passes the loaded drafts to the engine. A draft
that cannot be loaded, for any reason, changes nothing; `DraftSwapQueue.status` keeps the reason for the report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from specdecode_worker.contract import MAX_TASKS, DraftConfig, PendingDraft
from specdecode_worker.engine.drafts.draft_problem import describe_failure
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError

if TYPE_CHECKING:  # imported in the server process, which must not import torch
    from specdecode_worker.engine.drafts.loaded_draft import LoadDraft, LoadedDraft

POLL_SECONDS = 0.05
"""Interval at which an idle engine loop checks for a loaded draft, in seconds."""
MAX_DRAFTS = MAX_TASKS
"""Most drafts of a worker, the default draft included; tasks choose among them. It bounds the report."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftSwap:
    """Finished swap of the draft called ``name``. ``loaded`` is None on failure; ``problem`` is the reason."""

    name: str
    loaded: LoadedDraft | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """Swap of one draft for the report: the draft that is loading, and the reason why the last swap failed."""

    pending: PendingDraft | None = None
    problem: str | None = None


class DraftSwapQueue:
    """Queue of draft swaps, at most one for each name of a draft.

    One thread loads the drafts one by one, without effect on drafts in use. A new request for a name replaces the
    pending one of that name: if its draft is not loading yet it is never loaded, and otherwise the loaded draft is
    discarded.
    """

    def __init__(self, load: LoadDraft | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._load, self._clock = load, clock
        self._worker: ThreadPoolExecutor | None = None
        self._swaps: dict[str, tuple[PendingDraft, Future[DraftSwap]]] = {}
        self._problems: dict[str, str] = {}

    @property
    def pending(self) -> bool:
        """True if a draft is loading or waits to be taken over."""
        return bool(self._swaps)

    def status(self) -> Mapping[str, SwapStatus]:
        """Return the swaps that are pending or failed last, by the name of the draft."""
        pending = {name: SwapStatus(pending=draft) for name, (draft, _) in self._swaps.items()}
        return {name: SwapStatus(problem=problem) for name, problem in self._problems.items()} | pending

    def pending_draft(self, name: str) -> PendingDraft | None:
        """Return the draft that is loading to replace the one of this name, or None."""
        return self._swaps[name][0] if name in self._swaps else None

    def cancel(self, name: str) -> None:
        """Discard the pending swap of this name, if there is one."""
        if (cancelled := self._swaps.pop(name, None)) is not None:
            cancelled[1].cancel()

    def begin(self, message: SetDraft, in_use: Collection[str] = ()) -> None:
        """Start or queue the loading of a draft.

        Args:
            message: The draft, and the name of the draft that it replaces.
            in_use: Names of the drafts that the worker has.

        Raises:
            ModelError: The swap cannot be tried; nothing has changed.
        """
        config = _config_of(message)
        if self._load is None:
            raise ModelError("this engine cannot load a draft while it runs")
        self._make_room(message.name, in_use)
        pending = PendingDraft(
            method=config.method,
            hash=message.expected_hash,
            uri=config.uri or "",
            quantization=config.quantization,
            since_seconds=self._clock(),
        )
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self.cancel(message.name)
        self._problems.pop(message.name, None)
        future = self._worker.submit(_attempt, self._load, config, message.name, message.expected_hash)
        self._swaps[message.name] = pending, future

    def finished(self) -> Iterator[DraftSwap]:
        """Yield the finished swaps in the order of their requests.

        Raises:
            BaseException: The device does not work any more; see `describe_failure`.
        """
        for name, (_, future) in list(self._swaps.items()):
            if not future.done():
                return
            del self._swaps[name]
            swap = future.result()
            if swap.loaded is None:
                self.record_problem(name, swap.problem)
            yield swap

    def record_problem(self, name: str, problem: str) -> None:
        """Record why the last swap of this draft failed, also if it failed only when the engine took it over."""
        log.warning("the draft %r is not replaced: %s", name or "default", problem)
        self._problems[name] = problem

    def close(self) -> None:
        """Cancel queued swaps, without waiting for the one that is loading."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, name: str, in_use: Collection[str]) -> None:
        """Forget problems of drafts that never ran, oldest first, so that at most MAX_DRAFTS names remain."""
        taken = {"", name, *in_use, *self._swaps}
        if len(taken) > MAX_DRAFTS:
            raise ModelError(f"a worker has at most {MAX_DRAFTS} drafts; replace one of {', '.join(sorted(in_use))}")
        for other in [other for other in self._problems if other not in taken]:
            if len(taken | self._problems.keys()) > MAX_DRAFTS:
                del self._problems[other]


def _config_of(message: SetDraft) -> DraftConfig:
    try:
        config = DraftConfig.model_validate_json(message.draft_json)
    except ValidationError as error:
        raise ModelError("; ".join(one["msg"] for one in error.errors(include_url=False))) from None
    if config.method == "none":
        raise ModelError("method none is no draft; to stop speculating, send a plan without depth")
    return config


def _attempt(load: LoadDraft, config: DraftConfig, name: str, expected_hash: str) -> DraftSwap:
    """Load a draft. The result holds the failure as text, because an exception would keep tensors of the attempt."""
    try:
        loaded = load(config, name)
        loaded_hash = loaded.state.hash
        if expected_hash not in ("", loaded_hash):
            raise ModelError(
                f"{config.uri} has the hash {loaded_hash} and not {expected_hash}, the expected one: its files are "
                "another draft's, or its files changed while they were read; check them and ask again"
            )
        return DraftSwap(name, loaded)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return DraftSwap(name, None, describe_failure(error, config.uri or config.method))
