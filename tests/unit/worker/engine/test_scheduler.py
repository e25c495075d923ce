"""The scheduler: bounds of a batch, first come first served, and preemption that loses nothing.

`Device` plays the engine: it launches rows and collects them a step later or at once, with drawn numbers of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_engine import request

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.blocks import BLOCK_SIZE, BlockPool
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Limits, Row, Scheduler
from specdecode_worker.speculation.trees import PLAIN, Tree, tree_of

TREES = [PLAIN, tree_of(TreeShape.chain(3)), tree_of(TreeShape.levels(3, 2)), tree_of(TreeShape.chain(1), 4)]


@dataclass
class Device:
    """Runs batches of a scheduler; checks every one of them."""

    limits: Limits
    blocks: int
    trees: Sequence[Tree] = (PLAIN,)
    ahead: int = 0
    random: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, BlockPool(self.blocks))
        self.launched: deque[list[tuple[Row, int]]] = deque()
        self.admitted: list[str] = []
        self.finished: list[str] = []

    def step(self) -> list[Row]:
        rows = self.scheduler.next_batch(lambda requests: [self.random.choice(self.trees) for _ in requests])
        self.check(rows)
        for row in rows:
            if row.start == 0 and row.request.epoch == 0:
                self.admitted.append(row.request.id)
            row.request.in_flight.append(row.most_tokens)
        if rows:
            self.launched.append([(row, row.request.epoch) for row in rows])
        if self.launched and (not rows or len(self.launched) > self.ahead):
            for row, epoch in self.launched.popleft():
                self.collect(row, epoch)
        return rows

    def check(self, rows: list[Row]) -> None:
        self.scheduler.check()
        assert len(rows) == len({row.request.id for row in rows}) <= self.limits.max_num_seqs
        assert sum(row.count for row in rows) <= max(self.limits.max_num_batched_tokens, sum(r.chooses for r in rows))
        assert [row.chooses for row in rows] == sorted((row.chooses for row in rows), reverse=True)
        for row in rows:
            reach = row.start + row.count if row.is_chunk else row.request.cached_bound + len(row.tree.parents)
            assert row.request.slot >= 0
            assert reach <= len(row.request.blocks) * BLOCK_SIZE, "keys have blocks"

    def collect(self, row: Row, epoch: int) -> None:
        one = row.request
        if one.finish is not None or one.epoch != epoch:
            return
        emitted = self.random.randint(1, row.tree.depth + 1) if row.chooses else 0
        one.advance(row.most_tokens, row.count if row.is_chunk else emitted)
        one.take([7] * emitted)
        if one.finish is not None:
            self.finished.append(one.id)
            self.scheduler.release(one)

    def drain(self, most: int = 3000) -> None:
        while not self.scheduler.idle or self.launched:
            assert most > 0, "requests wait forever"
            most -= 1
            self.step()


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(4, 40),
    st.integers(8, 30),
    st.integers(0, 1),
    st.integers(0, 10**6),
)
def test_everyone_finishes_within_the_bounds_and_all_blocks_come_back(
    lengths: list[tuple[int, int]], seqs: int, budget: int, blocks: int, ahead: int, seed: int
) -> None:
    """The smallest pool (7 blocks) holds any one of these requests (100 tokens), which is all that is asked of it."""
    device = Device(Limits(seqs, budget), blocks, TREES, ahead, Random(seed))
    requests = [request(str(i), [1] * prompt, max_tokens=new) for i, (prompt, new) in enumerate(lengths)]
    for one in requests:
        device.scheduler.add(one)
    device.drain()
    assert [one.emitted for one in requests] == [new for _, new in lengths]
    assert [one.finish for one in requests] == ["length"] * len(lengths)
    assert device.admitted == [one.id for one in requests], "first come, first served"
    assert (device.scheduler.kv_tokens_used, device.scheduler.kv_tokens_total) == (0, (blocks - 1) * BLOCK_SIZE)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_as_long_as_the_cache_comes_to_its_end(ahead: int) -> None:
    """Its trees no longer fit towards the end; giving its blocks back for them would start it over without end."""
    device = Device(Limits(2, 200), blocks=1 + 6, trees=[tree_of(TreeShape.chain(6))], ahead=ahead)
    long = request("long", [1] * 50, max_tokens=6 * BLOCK_SIZE - 50)
    device.scheduler.add(long)
    device.drain(200)
    assert long.emitted == 6 * BLOCK_SIZE - 50
    assert device.scheduler.preemptions <= 1


def running(device: Device, count: int, prompt: int = 10, **sampling: int) -> list[Request]:
    requests = [request(str(i), [1] * prompt, max_tokens=sampling.get("max_tokens", 30)) for i in range(count)]
    for one in requests:
        device.scheduler.add(one)
    device.step()
    return requests


def test_prompts_take_what_decoding_leaves_of_the_budget() -> None:
    device = Device(Limits(4, 20), 50, [tree_of(TreeShape.chain(3))])
    running(device, 2, prompt=10)
    device.scheduler.add(request("long", [1] * 30))
    rows = device.step()
    assert [(row.request.id, row.count, row.is_chunk) for row in rows] == [
        ("0", 4, False),
        ("1", 4, False),
        ("long", 12, True),
    ]
    assert [(row.start, row.count) for row in device.step() if row.is_chunk] == [(12, 12)]
    last = [row for row in device.step() if row.is_chunk]
    assert [(row.start, row.count, row.chooses) for row in last] == [(24, 6, True)]


def test_a_tree_that_breaks_the_budget_becomes_a_plain_step() -> None:
    device = Device(Limits(3, 8), 50, [tree_of(TreeShape.chain(3))])
    for one in running(device, 3, prompt=2):
        assert one.decoding
    assert [row.count for row in device.step()] == [4, 1, 1]


def test_more_requests_than_budget_all_decode() -> None:
    device = Device(Limits(6, 4), 50)
    for _ in range(6):
        device.scheduler.add(request(str(_), [1]))
    while len([one for one in device.scheduler.running if one.decoding]) < 4:
        device.step()
    assert all(row.count == 1 for row in device.step())


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    device = Device(Limits(4, 100), 1 + 4)
    running(device, 1, prompt=20)
    device.scheduler.add(request("big", [1] * 40))
    device.scheduler.add(request("small", [1]))
    assert [row.request.id for row in device.step()] == ["0"]
    assert [one.id for one in device.scheduler.waiting] == ["big", "small"]


def test_the_youngest_gives_its_blocks_back_and_starts_again_first() -> None:
    device = Device(Limits(3, 100), 1 + 3)
    requests = running(device, 3, prompt=14)
    device.scheduler.add(request("later", [1]))
    while device.scheduler.preemptions == 0:
        device.step()
    victim = requests[2]
    assert [one.id for one in device.scheduler.waiting] == ["1", "2", "later"], "in the order in which they came"
    assert (victim.blocks, victim.slot, victim.cached, victim.epoch) == ([], -1, 0, 1)
    assert len(victim.tokens) == 14 + victim.emitted > 14, "nothing that was said is forgotten"
    said = victim.emitted
    device.drain()
    assert victim.emitted == 30
    assert said < 30


def test_release_frees_a_waiting_a_prefilling_and_a_decoding_request() -> None:
    device = Device(Limits(2, 8), 50)
    one, two, three = (request(str(i), [1] * size) for i, size in enumerate((4, 30, 4)))
    for each in (one, two, three):
        device.scheduler.add(each)
    device.step()
    assert (one.decoding, two.decoding, two.slot >= 0, three.slot) == (True, False, True, -1)
    for each in (three, two, one):
        each.finish = "abort"
        device.scheduler.release(each)
        device.scheduler.check()
    assert device.scheduler.idle
    assert device.scheduler.kv_tokens_used == 0
