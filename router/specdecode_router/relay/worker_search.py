"""Search for the worker of a request's next attempt, and the wait while there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specdecode_router.relay.attempt_history import AttemptHistory
from specdecode_router.relay.client_stream import RefusedByWorker
from specdecode_router.relay.context import Chooser, RelayContext
from specdecode_router.telemetry.metrics import Stage
from specdecode_router.workers.worker import Endpoint

_RETRY_SECONDS = 0.25
"""Time until a worker is chosen again where none could be chosen."""


class WorkerSearch:
    """Search for the workers of one request."""

    __slots__ = ("_chooser", "_context", "_history")

    def __init__(self, context: RelayContext, chooser: Chooser, history: AttemptHistory) -> None:
        self._context, self._chooser, self._history = context, chooser, history

    def choose(self, key: str, busy: Iterable[str] = ()) -> Endpoint | None:
        """Return a worker with a compatibility key (empty for any) that is not busy with the request; None without."""
        context, began = self._context, self._context.clock()
        exclude = frozenset(self._history.excluded(began).union(busy))
        view = self._chooser.choose(context.workers.views(), key, exclude)
        context.metrics.observe_added_latency(Stage.place, context.clock() - began)
        return None if view is None else view.endpoint

    async def wait(self, key: str, *, continues: bool, check: Callable[[float], None]) -> Endpoint:
        """Return the worker of the next attempt.

        While no worker accepts requests at all, the request waits as long as one that is held in the queue.

        Args:
            key: Compatibility key; empty for any.
            continues: True if the client has a part of the answer.
            check: Called with the time, again and again. It may raise.

        Raises:
            RefusedByWorker: Every worker has refused the request.
            ApiError: No worker can serve the request in time.
        """
        if (chosen := self.choose(key)) is not None:
            return chosen
        context, limits = self._context, self._context.limits
        began = last_empty = context.clock()
        with context.workers.stranded_request():
            while True:
                now = context.clock()
                check(now)
                if (chosen := self.choose(key)) is not None:
                    return chosen
                if (refusal := self._history.final_refusal()) is not None:
                    raise RefusedByWorker(refusal)
                if not context.workers.capacity:
                    last_empty = now
                if now >= min(last_empty + limits.no_worker_seconds, began + limits.hold_seconds):
                    raise self._history.no_worker(continues=continues)
                await context.workers.wait_for_change(_RETRY_SECONDS)
