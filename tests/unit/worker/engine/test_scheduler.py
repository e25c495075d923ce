"""The scheduler: batch limits, first come first served, fair shares, and preemption without loss of tokens."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.kv_cache import BLOCK_SIZE, BlockPool
from specdecode_worker.core.request import Request, Row, Selection
from specdecode_worker.engine.scheduler import PROMPT_SHARE, STEP_SECONDS, Limits, Scheduler
from specdecode_worker.sampling.trees import PLAIN, tree_of
from support.worker.accounts import check_scheduler
from support.worker.device import SimulatedDevice
from support.worker.small_engine import request

CHAIN = tree_of(TreeShape.chain(3))
TREES = [PLAIN, CHAIN, tree_of(TreeShape.levels(3, 2)), tree_of(TreeShape.chain(1), 4)]
MOST = 100
"""Tokens of the longest request in the state machine tests below."""
FEWEST_BLOCKS = 1 + -(-MOST // BLOCK_SIZE)
"""Size of a pool that can hold exactly one such request."""


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(4, 40),
    st.integers(FEWEST_BLOCKS, 30),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_all_requests_finish_within_the_limits_and_all_blocks_are_released(
    lengths: list[tuple[int, int]],
    seqs: int,
    budget: int,
    blocks: int,
    ahead: int,
    chunked: bool,
    caching: bool,
    seed: int,
) -> None:
    device = SimulatedDevice(Limits(seqs, budget, chunked), blocks, TREES, ahead, Random(seed), caching)
    requests = [device.arrive(str(i), [1] * prompt, new) for i, (prompt, new) in enumerate(lengths)]
    device.drain()
    assert [one.emitted for one in requests] == [new for _, new in lengths]
    assert [one.finish for one in requests] == ["length"] * len(lengths)
    # A cached prefix makes a long prompt short, so the lanes are known only without the cache.
    if not chunked or not caching:
        short = device.scheduler._short if chunked else MOST
        for is_long in (False, True):
            lane = [one.id for one in requests if (len(one.submit.prompt) > short) == is_long]
            assert [name for name in device.admitted if name in lane] == lane, "first come, first served"
    assert (device.scheduler.kv_tokens_used, device.scheduler.kv_tokens_total) == (0, (blocks - 1) * BLOCK_SIZE)


class Traffic(RuleBasedStateMachine):
    """Arrivals with shared prefixes, aborts and steps in any order, over pools that hold at most about two requests."""

    @initialize(
        limits=st.builds(Limits, st.integers(1, 4), st.integers(4, 40), st.booleans()),
        blocks=st.integers(FEWEST_BLOCKS, 20),
        ahead=st.integers(0, 1),
        caching=st.booleans(),
        seed=st.integers(0, 10**6),
    )
    def begin(self, limits: Limits, blocks: int, ahead: int, caching: bool, seed: int) -> None:
        self.device = SimulatedDevice(limits, blocks, TREES, ahead, Random(seed), caching)
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    @rule(
        topic=st.integers(1, 2),
        common=st.integers(1, 40),
        own=st.integers(0, 20),
        new=st.integers(1, 40),
        times=st.integers(1, 4),
    )
    def arrive(self, topic: int, common: int, own: int, new: int, times: int) -> None:
        for _ in range(times):
            name = str(len(self.requests))
            prompt = [topic] * common + [5 + len(self.requests)] * own
            self.requests.append(self.device.arrive(name, prompt, new))

    @rule(topic=st.integers(0, 30))
    def ask_on(self, topic: int) -> None:
        """Add a request that continues the text of an earlier one by a few tokens."""
        if self.requests:
            before = self.requests[topic % len(self.requests)]
            prompt = [*before.tokens, 3, 4][: MOST - 20]
            self.requests.append(self.device.arrive(str(len(self.requests)), prompt, 20))

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        alive = [one for one in self.requests if one.finish is None]
        if alive:
            one = alive[which % len(alive)]
            one.finish = "abort"
            self.aborted.add(one.id)
            self.device.scheduler.release(one)

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.device.step()

    @precondition(lambda self: len(self.requests) > 2)
    @rule()
    def finish(self) -> None:
        self.device.drain()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "device"):
            check_scheduler(self.device.scheduler)
            scheduler = self.device.scheduler
            known = scheduler.kv_tokens_used + scheduler.kv_tokens_cached
            assert known + self.device.pool.free * BLOCK_SIZE == scheduler.kv_tokens_total

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.device.drain()
            for one in self.requests:
                assert (one.finish == "abort") == (one.id in self.aborted)
                assert one.finish == "abort" or one.emitted == one.submit.sampling.max_tokens, "a request was lost"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("chunked", [True, False])
def test_one_block_more_than_the_largest_request_needs_is_enough(ahead: int, chunked: bool) -> None:
    """Eight of the largest requests preempt each other all the time, and all of them finish."""
    device = SimulatedDevice(Limits(8, 64, chunked), FEWEST_BLOCKS + 1, TREES, ahead, Random(1))
    requests = [device.arrive(str(i), [i] * 20, MOST - 20) for i in range(8)]
    device.drain(2000)
    assert [one.emitted for one in requests] == [MOST - 20] * 8
    assert device.scheduler.counters.preemptions >= 8


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_as_long_as_the_cache_finishes(ahead: int) -> None:
    """The trees of the request no longer fit towards the end; giving up blocks for them, it would restart forever."""
    device = SimulatedDevice(Limits(2, 200), blocks=1 + 6, trees=[tree_of(TreeShape.chain(6))], ahead=ahead)
    long = device.arrive("long", [1] * 50, 6 * BLOCK_SIZE - 50)
    device.drain(200)
    assert long.emitted == 6 * BLOCK_SIZE - 50
    assert device.scheduler.counters.preemptions == 0


def running(device: SimulatedDevice, count: int, prompt: int = 10, new: int = 30) -> list[Request]:
    """Return prefilled requests without shared prefixes."""
    requests = [device.arrive(str(i), [i] * prompt, new) for i in range(count)]
    device.step()
    return requests


def seen(rows: list[Row]) -> list[tuple[str, int, bool]]:
    return [(row.request.id, row.count, row.is_chunk) for row in rows]


def test_prompts_use_the_token_budget_that_decoding_leaves() -> None:
    device = SimulatedDevice(Limits(4, 20), 50, [CHAIN])
    running(device, 2, prompt=10)
    device.arrive("long", [9] * 30)
    assert seen(device.step()) == [("0", 4, False), ("1", 4, False), ("long", 12, True)]
    assert [(row.start, row.count) for row in device.step() if row.is_chunk] == [(12, 12)]
    last = [row for row in device.step() if row.is_chunk]
    assert [(row.start, row.count, row.emits) for row in last] == [(24, 6, True)]


def test_a_tree_over_the_token_budget_becomes_a_plain_step() -> None:
    device = SimulatedDevice(Limits(3, 8), 50, [CHAIN])
    for one in running(device, 3, prompt=2):
        assert one.decoding
    assert [row.count for row in device.step()] == [4, 1, 1]


def test_a_prompt_gets_its_token_share_for_any_number_of_decoding_requests() -> None:
    """With 15 decoding sequences and 16 tokens per step, the sequences run without trees and take turns."""
    device = SimulatedDevice(Limits(16, 16), 200, [CHAIN])
    requests = running(device, 15, prompt=1, new=60)
    device.arrive("long", [9] * 40)
    before = [one.emitted for one in requests]
    steps = [device.step() for _ in range(10)]
    assert [[row.count for row in rows if row.is_chunk] for rows in steps] == [[16 // PROMPT_SHARE]] * 10
    assert min(one.emitted - was for one, was in zip(requests, before, strict=True)) >= 9, "nobody starves"


def test_a_prompt_that_cannot_run_reserves_no_tokens() -> None:
    device = SimulatedDevice(Limits(2, 8), 50, [CHAIN])
    running(device, 2, prompt=2)
    device.arrive("no slot", [9] * 40)
    assert [row.count for row in device.step()] == [4, 4]


def test_without_chunks_a_prompt_longer_than_the_budget_runs_alone() -> None:
    device = SimulatedDevice(Limits(4, 20, chunked_prefill=False), 50, [CHAIN])
    running(device, 2, prompt=10)
    device.arrive("long", [9] * 30)
    device.arrive("short", [8] * 6)
    assert seen(device.step()) == [("long", 30, True)]
    after = seen(device.step())
    assert [name for name, *_ in after] == ["0", "1", "long", "short"], "those it held up come first"
    assert after[-1] == ("short", 6, True)


def test_without_chunks_neither_prompts_nor_decoding_starve() -> None:
    """While prompts that fill a step keep coming, decoding gets every other step."""
    device = SimulatedDevice(Limits(64, 20, chunked_prefill=False), 400, [CHAIN])
    one = device.arrive("0", [0] * 10, new=12)
    for i in range(1, 40):
        device.arrive(str(i), [i] * 20, new=1)
    prompts = sum(row.is_chunk for _ in range(30) for row in device.step())
    assert one.finish == "length"
    assert prompts >= 14


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    device = SimulatedDevice(Limits(4, 100), 1 + 4)
    running(device, 1, prompt=20)
    device.arrive("big", [8] * 40)
    device.arrive("small", [9])
    assert [row.request.id for row in device.step()] == ["0"]
    assert [one.id for one in device.scheduler.waiting] == ["big", "small"]


def test_a_short_prompt_overtakes_long_ones() -> None:
    """A short prompt starts in the step after its arrival, and the oldest long prompt keeps half of the budget."""
    device = SimulatedDevice(Limits(4, 40), 100)
    for name in ("long", "next"):
        device.arrive(name, [len(name)] * 200, new=1)
    assert seen(device.step()) == [("long", 40, True)]
    device.arrive("short", [7] * 15, new=1)
    assert seen(device.step()) == [("short", 15, True), ("long", 25, True)]
    assert seen(device.step()) == [("long", 40, True)]
    device.drain()
    assert device.admitted == ["long", "short", "next"]


def test_a_long_prompt_ends_while_short_ones_keep_coming() -> None:
    device = SimulatedDevice(Limits(4, 40), 100)
    long = device.arrive("long", [9] * 400, new=1)
    steps = 0
    while long.finish is None:
        device.arrive(str(steps), [1 + steps % 5] * 20, new=1)
        device.arrive(f"{steps} again", [6 + steps % 3] * 20, new=1)
        device.step()
        steps += 1
    assert 10 < steps <= 400 // 20 + 1


def test_a_long_prompt_leaves_room_for_short_ones_when_it_is_admitted() -> None:
    device = SimulatedDevice(Limits(4, 40), 100)
    device.arrive("long", [9] * 200, new=1)
    device.arrive("short", [7] * 15, new=1)
    assert seen(device.step()) == [("short", 15, True), ("long", 25, True)]


def test_a_waiting_long_prompt_is_not_overtaken_when_it_is_next() -> None:
    """The short prompt could have the last slot, which would go to the next short prompt again and again."""
    device = SimulatedDevice(Limits(1, 40), 100)
    device.arrive("runs", [5] * 10, new=3)
    device.step()
    device.arrive("long", [9] * 60, new=1)
    device.arrive("short", [7] * 15, new=1)
    device.drain()
    assert device.admitted == ["runs", "long", "short"]


def test_slow_prefill_steps_shorten_the_chunks() -> None:
    device = SimulatedDevice(Limits(4, 64), 100)
    device.scheduler.prefill_limit.record_step(64, 4 * STEP_SECONDS)
    device.arrive("long", [9] * 100, new=1)
    assert seen(device.step()) == [("long", 16, True)]


def test_blocks_of_a_long_prompt_are_allocated_by_chunk_and_reserved_until_then() -> None:
    """A prompt needs 7 of 12 blocks and holds 2 after its first chunk. No other prompt gets the 5 that it lacks."""
    device = SimulatedDevice(Limits(4, 24), 1 + 12)
    long = device.arrive("long", [1] * 100)
    device.step()
    assert len(long.blocks) == 2
    device.arrive("other", [2] * 70)
    device.step()
    assert [one.id for one in device.scheduler.waiting] == ["other"], "it needs 5 blocks, and one is the other's"
    assert device.pool.free == 12 - 3


def test_the_youngest_request_is_preempted_and_readmitted_first() -> None:
    device = SimulatedDevice(Limits(3, 100), 1 + 4)
    requests = running(device, 3, prompt=14)
    assert len(device.scheduler.running) == 2, "the third would be driven out at once"
    device.arrive("later", [9])
    while device.scheduler.counters.preemptions == 0:
        device.step()
    victim = next(iter(device.scheduler.waiting))
    assert victim is requests[1]
    assert [one.id for one in device.scheduler.waiting] == ["1", "2", "later"], "in the order in which they came"
    assert (victim.blocks, victim.slot, victim.cached, victim.epoch) == ([], -1, 0, 1)
    assert len(victim.tokens) == 14 + victim.emitted > 14, "nothing that was said is forgotten"
    said = victim.emitted
    device.drain()
    assert victim.emitted == 30
    assert said < 30


def test_a_batch_of_64_with_256_waiting_is_scheduled_within_a_millisecond() -> None:
    """The test uses the fastest of many runs, because the machine may be busy."""
    scheduler = Scheduler(Limits(64, 512), BlockPool(4000))
    for i in range(320):
        scheduler.add(request(str(i), [i] * 8, max_tokens=400))
    seconds = []
    for _ in range(60):
        began = time.perf_counter()
        rows, _ = scheduler.next_batch(lambda requests: Selection([CHAIN] * len(requests)))
        seconds.append(time.perf_counter() - began)
        for row in rows:
            row.request.in_flight.append(row.max_committed)
            row.request.advance(row.max_committed)
    assert (len(scheduler.running), len(scheduler.waiting)) == (64, 256)
    assert min(seconds[10:]) < 1e-3
