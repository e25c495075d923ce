"""Simulation of multi-turn conversations over workers with LRU prefix caches, placed by three policies."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.choose import LOAD_FACTOR, place
from specdecode_router.placement.prefix_table import PrefixTable
from specdecode_router.workers.worker import Endpoint, WorkerView

WORKERS = 4
ROWS = 8
"""Largest batch of a worker."""
CONVERSATIONS = 64
"""Conversations at the same time; a new one starts when one ends."""
TURNS = 8
TURN_TOKENS, ANSWER_TOKENS = 400, 100
PREFILL_TOKENS_PER_SECOND, DECODE_TOKENS_PER_SECOND = 4000, 60
THINK_SECONDS = 4.0
SECONDS = 600.0

Policy = Callable[[Sequence[WorkerView], Affinity, dict[str, float]], str]


@dataclass
class Worker:
    """Worker with a batch, a queue and a cache of prefixes."""

    view: WorkerView
    cache_tokens: int
    in_flight: int = 0
    running: int = 0
    waiting: deque[Turn] = field(default_factory=deque)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def store(self, conversation: int, tokens: int) -> None:
        """Store a prefix as the most recent one, and evict the oldest ones."""
        self.cache.pop(conversation, None)
        self.cache[conversation] = tokens
        while sum(self.cache.values()) > self.cache_tokens and len(self.cache) > 1:
            self.cache.popitem(last=False)


@dataclass
class Turn:
    """One request of a conversation."""

    conversation: int
    number: int
    arrival: float

    @property
    def prompt_tokens(self) -> int:
        return (self.number + 1) * TURN_TOKENS + self.number * ANSWER_TOKENS


@dataclass
class Result:
    """Measures of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Time with at least two requests per worker in flight."""
    overloaded_seconds: float = 0.0
    """Part of it in which a worker had more than its bound, and one request that ended elsewhere meanwhile."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.ttft)

    @property
    def overloaded(self) -> float:
        return self.overloaded_seconds / self.busy_seconds


class Simulation:
    """One run of a policy. Equal arguments give equal results."""

    def __init__(self, policy: Policy, *, cache_tokens: int = 64_000, hot_share: float = 0.0, seed: int = 1) -> None:
        self.policy, self.hot_share = policy, hot_share
        self.random = random.Random(seed)
        self.workers = {
            name: Worker(WorkerView(Endpoint(name, ""), 0, max_num_seqs=ROWS), cache_tokens)
            for name in (f"worker-{index}" for index in range(WORKERS))
        }
        self.table = PrefixTable()
        self.result = Result()
        self.now = 0.0
        self.order = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.conversations = itertools.count()

    def run(self) -> Result:
        for _ in range(CONVERSATIONS):
            self.schedule(self.random.uniform(0, THINK_SECONDS), self.start_conversation)
        while self.events[0][0] < SECONDS:
            time, _, event = heapq.heappop(self.events)
            self.measure(time - self.now)
            self.now = time
            event()
        return self.result

    def schedule(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), event))

    def start_conversation(self) -> None:
        self.arrive(next(self.conversations), 0)

    def arrive(self, conversation: int, number: int) -> None:
        turn = Turn(conversation, number, self.now)
        views = [
            WorkerView(worker.view.endpoint, worker.in_flight, max_num_seqs=ROWS) for worker in self.workers.values()
        ]
        affinity = self.affinity(conversation)
        worker = self.workers[self.policy(views, affinity, self.table.expected(affinity))]
        worker.in_flight += 1
        worker.waiting.append(turn)
        self.admit(worker)

    def affinity(self, conversation: int) -> Affinity:
        """Return the affinity of a conversation. A share of them begin with the same characters."""
        hot = random.Random(conversation).random() < self.hot_share
        return Affinity("", "", b"hot" if hot else conversation.to_bytes(8, "big"))

    def admit(self, worker: Worker) -> None:
        while worker.waiting and worker.running < ROWS:
            turn = worker.waiting.popleft()
            worker.running += 1
            cached = min(worker.cache.get(turn.conversation, 0), turn.prompt_tokens)
            worker.store(turn.conversation, turn.prompt_tokens)
            prefill = (turn.prompt_tokens - cached) / PREFILL_TOKENS_PER_SECOND
            self.result.prompt_tokens += turn.prompt_tokens
            self.result.cached_tokens += cached
            self.result.ttft.append(self.now + prefill - turn.arrival)
            decode = self.random.uniform(0.5, 1.5) * ANSWER_TOKENS / DECODE_TOKENS_PER_SECOND
            self.schedule(prefill + decode, lambda turn=turn, cached=cached: self.finish(worker, turn, cached))  # type: ignore[misc]

    def finish(self, worker: Worker, turn: Turn, cached: int) -> None:
        worker.in_flight -= 1
        worker.running -= 1
        worker.store(turn.conversation, turn.prompt_tokens + ANSWER_TOKENS)
        self.table.record(
            self.affinity(turn.conversation),
            worker.view.endpoint.name,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=ANSWER_TOKENS,
        )
        self.admit(worker)
        think = self.random.expovariate(1 / THINK_SECONDS)
        if turn.number + 1 < TURNS:
            self.schedule(think, lambda: self.arrive(turn.conversation, turn.number + 1))
        else:
            self.schedule(think, self.start_conversation)

    def measure(self, seconds: float) -> None:
        loads = [worker.in_flight for worker in self.workers.values()]
        if sum(loads) < 2 * WORKERS:
            return
        self.result.busy_seconds += seconds
        if max(loads) > math.ceil(LOAD_FACTOR * sum(loads) / WORKERS) + 1:
            self.result.overloaded_seconds += seconds


def by_affinity(views: Sequence[WorkerView], affinity: Affinity, expected: dict[str, float]) -> str:
    placement = place(views, affinity, expected=expected)
    return placement.worker.endpoint.name


def round_robin() -> Policy:
    turns = itertools.count()
    return lambda views, affinity, expected: views[next(turns) % len(views)].endpoint.name


def least_loaded(views: Sequence[WorkerView], affinity: Affinity, expected: dict[str, float]) -> str:
    return min(views, key=lambda view: view.in_flight).endpoint.name


@pytest.mark.parametrize("cache_tokens", [64_000, 30_000])
def test_affinity_hits_more_prefixes_and_waits_less_than_the_other_policies(cache_tokens: int) -> None:
    """The caches hold all conversations once, or half of them."""
    ours, robin, least = (
        Simulation(policy, cache_tokens=cache_tokens).run() for policy in (by_affinity, round_robin(), least_loaded)
    )
    assert ours.hit_rate > 1.3 * max(robin.hit_rate, least.hit_rate)
    assert ours.mean_ttft < 0.8 * min(robin.mean_ttft, least.mean_ttft)


@pytest.mark.parametrize("hot_share", [0.0, 0.6])
def test_no_worker_is_above_its_bound_for_long(hot_share: float) -> None:
    """Bound the load also if most conversations have the same beginning, and so the same preferred worker."""
    ours = Simulation(by_affinity, hot_share=hot_share).run()
    assert ours.busy_seconds > SECONDS / 2
    assert ours.overloaded < 0.02


def test_the_table_of_cached_prefixes_adds_hits() -> None:
    """A conversation that spilled once goes on where its prefix is."""
    without = Simulation(lambda views, affinity, expected: by_affinity(views, affinity, {})).run()
    assert Simulation(by_affinity).run().hit_rate > without.hit_rate
