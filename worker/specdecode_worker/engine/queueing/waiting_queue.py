"""Queue of waiting requests: clients take turns by the tokens they used; within a client, first come first served.

A client's tokens are divided by its weight, so that clients of routers keep the shares that the routers gave them.

Turns follow start-time fair queueing (Goyal et al. 1996) with the token costs of VTC (Sheng et al. 2024). The client
with the fewest tokens is next. A client that was absent starts at the level of the client served last, so that it
neither saves up turns nor waits for the others. With one client the order is the order of arrival.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from specdecode_worker.engine.request import Request

OUTPUT_COST = 2
"""Cost of an output token in prompt tokens, as in VTC: it needs a row of a step, a prompt token only part of one."""

_ORDER = attrgetter("order")


@dataclass(slots=True)
class _Line:
    """Waiting requests of one client, in order of arrival, short and long prompts apart."""

    short: list[Request] = field(default_factory=list)
    long: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.short or self.long)

    def first(self, *, skip_long: bool) -> Request | None:
        """Return the oldest request, or the oldest short one."""
        heads = [lane[0] for lane in ((self.short,) if skip_long else (self.short, self.long)) if lane]
        return min(heads, key=_ORDER) if heads else None


class WaitingQueue:
    """Waiting requests of all clients. Preempted requests come first, because they were admitted already."""

    def __init__(self, short: int) -> None:
        """Start empty. Prompts with at most ``short`` expected tokens to prefill are short."""
        self.short_tokens = 0
        """Expected tokens to prefill of all short prompts."""
        self._short = short
        self._preempted = _Line()
        self._lines: dict[str, _Line] = {}
        self._used: dict[str, float] = {}
        self._level = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests in order of arrival."""
        lines = (self._preempted, *self._lines.values())
        return iter(sorted((one for line in lines for one in (*line.short, *line.long)), key=_ORDER))

    def add(self, request: Request) -> None:
        """Append a new request, or put a preempted one back. ``expected_prefill`` of the request must be set."""
        client = request.submit.client
        if request.epoch:
            line = self._preempted
        else:
            line = self._lines.setdefault(client, _Line())
            self._used[client] = max(self._used.get(client, 0.0), self._level)
        insort(self._lane(line, request), request, key=_ORDER)
        self._count += 1
        self.short_tokens += request.expected_prefill if request.expected_prefill <= self._short else 0

    def first(self, *, skip_long: bool = False) -> Request | None:
        """Return the request that is next, or the next short one with ``skip_long``. None if there is none."""
        preempted = self._preempted.first(skip_long=skip_long)
        if preempted is not None or len(self._lines) == 0:
            return preempted
        heads = [(self._used[client], line.first(skip_long=skip_long)) for client, line in self._lines.items()]
        ready = [(used, head.order, head) for used, head in heads if head is not None]
        return min(ready)[2] if ready else None

    def admit(self, request: Request) -> None:
        """Remove a request that starts to run and charge its prompt to its client."""
        self.remove(request)
        if request.epoch == 0:
            client, weight = request.submit.client, request.submit.weight
            self._level = max(self._level, self._used.get(client, 0.0))
            self._used[client] = self._used.get(client, self._level) + request.expected_prefill / weight
            self._forget_absent()

    def remove(self, request: Request) -> None:
        """Remove a request, e.g. because it was cancelled. Requests that do not wait are ignored."""
        client = request.submit.client
        line = self._preempted if request.epoch else self._lines.get(client)
        lane = [] if line is None else self._lane(line, request)
        if line is None or request not in lane:
            return
        lane.remove(request)
        self._count -= 1
        self.short_tokens -= request.expected_prefill if request.expected_prefill <= self._short else 0
        if not line and line is not self._preempted:
            del self._lines[client]

    def charge_output(self, request: Request) -> None:
        """Charge the output tokens of a request that ended to its client."""
        client, tokens = request.submit.client, OUTPUT_COST * request.generated
        self._used[client] = max(self._used.get(client, 0.0), self._level) + tokens / request.submit.weight
        self._forget_absent()

    def _lane(self, line: _Line, request: Request) -> list[Request]:
        return line.short if request.expected_prefill <= self._short else line.long

    def _forget_absent(self) -> None:
        """Drop the counters of absent clients that have no more tokens than a new client would start with."""
        for client in [one for one, used in self._used.items() if used <= self._level and one not in self._lines]:
            del self._used[client]
