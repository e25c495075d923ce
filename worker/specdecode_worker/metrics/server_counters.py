"""Counters of the server: speculation by task, sizes and times of requests, and requests by API key."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_worker.capture import CaptureCounts
from specdecode_worker.engine.ipc.messages import FinishReason, Tokens

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MILLISECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 75, 100, 200, 500, 1000)
LATENCY_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
"""Upper bounds of the latency buckets by API key, in seconds. They are coarse, because they exist for every key."""
MAX_API_KEYS = 32
"""Most names of API keys that are exported. It bounds the number of time series; all further keys count as other."""
OTHER_API_KEY = "other"


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


class KeyCounts:
    """Request counts of one API key."""

    __slots__ = ("e2e", "finished", "generation_tokens", "prompt_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = self.finished = self.prompt_tokens = self.generation_tokens = 0
        self.ttft, self.e2e = Histogram(LATENCY_EDGES), Histogram(LATENCY_EDGES)


class ServerCounters:
    """Monotonic counters of the server.

    Args:
        clock: Monotonic clock, in seconds.
        capture: Counters of the recorder, if traffic is captured.
        api_keys: Count requests by the name of their API key.
    """

    def __init__(
        self, clock: Callable[[], float], capture: CaptureCounts | None = None, *, api_keys: bool = False
    ) -> None:
        self.clock = clock
        self.timeouts = {"deadline": 0, "queue": 0}
        """Requests that the engine cancelled: at their deadline, or after the longest time in the queue."""
        self.by_key: dict[str, KeyCounts] = {}
        self._api_keys = api_keys
        self.capture = capture or CaptureCounts()
        self.by_task: defaultdict[str, TaskCounts] = defaultdict(TaskCounts)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.seconds_per_token = Histogram(tuple(edge / 1000 for edge in _MILLISECONDS))

    def request_counter(
        self, task: str, prompt_tokens: int, client: str = "", earlier_tokens: int | None = None
    ) -> RequestCounter:
        """Return the observer of a request.

        Args:
            task: Task of the request.
            prompt_tokens: Number of its prompt tokens.
            client: Name of its API key.
            earlier_tokens: Output tokens of an earlier attempt on another worker, which counted the arrival of the
                request; None for a new request.
        """
        return RequestCounter(self, task, prompt_tokens, self._key_counts(client), earlier_tokens)

    def _key_counts(self, client: str) -> KeyCounts:
        """Return the counts of an API key. They are not exported for requests without a key."""
        if not self._api_keys or not client:
            return KeyCounts()
        named = len(self.by_key) - (OTHER_API_KEY in self.by_key)
        name = client if client in self.by_key or named < MAX_API_KEYS else OTHER_API_KEY
        return self.by_key.setdefault(name, KeyCounts())


class RequestCounter:
    """Observer that counts one request. It receives every message in order; messages have cumulative counts."""

    __slots__ = ("_began", "_continued", "_counts", "_earlier_tokens", "_ended", "_first", "_key", "_last",
                 "_previous", "_prompt_tokens", "_task", "_tokens")  # fmt: skip

    def __init__(
        self,
        counts: ServerCounters,
        task: str,
        prompt_tokens: int,
        key: KeyCounts,
        earlier_tokens: int | None = None,
    ) -> None:
        self._counts = counts
        self._key = key
        self._began = counts.clock()
        self._continued, self._earlier_tokens = earlier_tokens is not None, earlier_tokens or 0
        if not self._continued:
            key.requests += 1
            key.prompt_tokens += prompt_tokens
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
            if not self._tokens:
                self._first = self._last
                if not self._continued:
                    self._key.ttft.add(self._first - self._began)
            self._tokens += len(tokens.tokens)
        if tokens.finish is not None:
            self._count_finish(tokens.finish)

    def _count_finish(self, finish: FinishReason) -> None:
        if finish == "deadline":
            self._counts.timeouts["deadline"] += 1
        elif finish == "queue_timeout":
            self._counts.timeouts["queue"] += 1
        elif finish in ("stop", "length"):
            self._key.finished += 1
            if not self._continued:
                self._key.e2e.add(self._last - self._began)

    def end(self, *, moved: bool = False) -> None:
        """Count the ended request in the histograms. Further calls, and requests without output, are not counted.

        Args:
            moved: Another worker continues the request, and counts its size.
        """
        if self._ended or not self._tokens:
            return
        self._ended = True
        self._key.generation_tokens += self._tokens
        if moved:
            return
        self._counts.prompt_tokens.add(self._prompt_tokens)
        self._counts.generation_tokens.add(self._earlier_tokens + self._tokens)
        if self._tokens > 1:
            self._counts.seconds_per_token.add((self._last - self._first) / (self._tokens - 1))
