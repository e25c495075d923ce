"""Counters of the server: speculation per task, and token counts and time per token of single requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_worker.capture import CaptureCounts
from specdecode_worker.engine.ipc.messages import Tokens

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MILLISECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 75, 100, 200, 500, 1000)


@dataclass(slots=True)
class TaskCounts:
    """Speculation counts of one task; ``per_position[i]`` is the number of accepted tokens at depth i + 1."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class Histogram:
    """Observation counts per bucket. ``edges`` are inclusive upper bounds; one further bucket has no bound."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class ServerCounters:
    """Monotonic counters of the server.

    Args:
        clock: Monotonic clock, in seconds.
        capture: Counters of the recorder, if traffic is captured.
    """

    def __init__(self, clock: Callable[[], float], capture: CaptureCounts | None = None) -> None:
        self.clock = clock
        self.capture = capture or CaptureCounts()
        self.by_task: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.seconds_per_token = Histogram(tuple(edge / 1000 for edge in _MILLISECONDS))

    def request_counter(self, task: str, prompt_tokens: int) -> RequestCounter:
        """Return the observer of a new request."""
        return RequestCounter(self, task, prompt_tokens)


class RequestCounter:
    """Observer that counts one request. It receives every message in order; messages have cumulative counts."""

    __slots__ = ("_counts", "_ended", "_first", "_last", "_previous", "_prompt_tokens", "_task", "_tokens")

    def __init__(self, counts: ServerCounters, task: str, prompt_tokens: int) -> None:
        self._counts = counts
        self._task = counts.by_task[task]
        self._prompt_tokens = prompt_tokens
        self._previous = Tokens(request_id="", tokens=())
        self._tokens = 0
        self._first = self._last = 0.0
        self._ended = False

    def process(self, tokens: Tokens) -> None:
        """Count the increase since the previous message."""
        task, previous = self._task, self._previous
        accepted = tokens.accepted - previous.accepted
        task.drafts += tokens.drafts - previous.drafts
        task.draft_tokens += tokens.draft_tokens - previous.draft_tokens
        task.accepted += accepted
        for position in range(accepted):
            task.per_position[position] += 1
        self._previous = tokens
        if tokens.tokens:
            self._last = self._counts.clock()
            self._first = self._first if self._tokens else self._last
            self._tokens += len(tokens.tokens)

    def end(self) -> None:
        """Count the ended request in the histograms. Further calls, and requests without output, are not counted."""
        if self._ended or not self._tokens:
            return
        self._ended = True
        self._counts.prompt_tokens.add(self._prompt_tokens)
        self._counts.generation_tokens.add(self._tokens)
        if self._tokens > 1:
            self._counts.seconds_per_token.add((self._last - self._first) / (self._tokens - 1))
