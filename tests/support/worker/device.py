"""Simulated device that plays the engine for a scheduler: launches rows and collects them at once or a step later.

The number of tokens per step is random. The simulation records the key in every slot of every block, so that it detects
a read of a key that was never written or was overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from specdecode_worker.core.kv_cache import BLOCK_SIZE, BlockPool
from specdecode_worker.core.request import Request, Row, Selection
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.sampling.trees import PLAIN, Tree
from support.worker.accounts import check_scheduler
from support.worker.small_engine import request

GARBAGE = -1


def text_of(prompt: Sequence[int], new: int) -> list[int]:
    """Return a prompt and its only possible continuation. Different prompts continue differently."""
    random = Random(repr(list(prompt)))
    return [*prompt, *(random.randint(0, 99) for _ in range(new))]


def keys_of(text: Sequence[int]) -> list[int]:
    """Return a stand-in for the key at each position, which depends on all tokens up to there."""
    return list(accumulate(text, lambda key, token: hash((key, token)) & 0x7FFFFFFF, initial=0))[1:]


@dataclass
class SimulatedDevice:
    """Runs batches of a scheduler and checks every one of them."""

    limits: Limits
    blocks: int
    trees: Sequence[Tree] = (PLAIN,)
    ahead: int = 0
    random: Random = field(default_factory=Random)
    caching: bool = True

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, contiguous=not self.ahead)
        self.scheduler = Scheduler(self.limits, self.pool, prefix_caching=self.caching)
        self.launched: deque[list[tuple[Row, int, int]]] = deque()
        self.admitted: list[str] = []
        self._texts: dict[str, list[int]] = {}
        self._keys: dict[str, list[int]] = {}
        self._cells: dict[tuple[int, int], int] = {}
        self._lengths: dict[tuple[str, int], int] = {}

    def arrive(
        self, name: str, prompt: Sequence[int], new: int = 30, *, cache_salt: str = "", **sampling: int
    ) -> Request:
        one = request(name, prompt, max_tokens=new, cache_salt=cache_salt, **sampling)
        self._texts[name] = text_of(prompt, new + 80)
        self._keys[name] = keys_of(self._texts[name])
        self.scheduler.add(one)
        return one

    def step(self) -> Sequence[Row]:
        rows, _ = self.scheduler.next_batch(self._select)
        self.check(rows)
        assert rows or self.launched or self.scheduler.idle, "nobody gets on"
        if rows:
            self.launched.append([(row, row.request.epoch, self._run(row)) for row in rows])
        for row in rows:
            row.request.in_flight.append(row.max_committed)
            if row.is_chunk:
                self.scheduler.reuse.publish(row.request, row.start + row.count)
        if self.launched and (not rows or len(self.launched) > self.ahead):
            for row, epoch, emitted in self.launched.popleft():
                self._collect(row, epoch, emitted)
        check_scheduler(self.scheduler)
        return rows

    def _select(self, requests: Sequence[Request]) -> Selection:
        return Selection([self.random.choice(self.trees) for _ in requests])

    def check(self, rows: Sequence[Row]) -> None:
        check_scheduler(self.scheduler)
        assert len(rows) == len({row.request.id for row in rows}) <= self.limits.max_num_seqs
        alone = len(rows) == 1 and not self.limits.chunked_prefill
        assert alone or sum(row.count for row in rows) <= self.limits.max_num_batched_tokens
        assert [row.emits for row in rows] == sorted((row.emits for row in rows), reverse=True)
        for row in rows:
            reach = row.start + row.count if row.is_chunk else row.request.cached_bound + len(row.tree.parents)
            assert row.request.slot >= 0
            assert reach <= len(row.request.blocks) * BLOCK_SIZE, "keys have blocks"
            assert self.limits.chunked_prefill or not row.is_chunk or row.emits, "prompts run whole"
        for order in ([one.order for one in self.scheduler.running], [one.order for one in self.scheduler.waiting]):
            assert order == sorted(order), "first come, first served"

    def drain(self, most: int = 5000) -> None:
        while not self.scheduler.idle or self.launched:
            assert most > 0, "requests wait forever"
            most -= 1
            self.step()
        assert self.pool.free + self.pool.cached == self.pool.total, "idle, and a block is not free or cached"

    def _run(self, row: Row) -> int:
        """Execute a row as the device would and return the number of emitted tokens."""
        one = row.request
        name = one.id, one.epoch
        if row.is_first_chunk:
            self._lengths[name] = one.prefix
            if one.epoch == 0:
                self.admitted.append(one.id)
        length, keys = self._lengths[name], self._keys[one.id]
        assert not row.is_chunk or row.start == length, "chunks follow each other"
        if row.is_chunk:
            emitted, committed = int(row.emits), row.count
        else:
            emitted = committed = self.random.randint(1, row.tree.depth + 1)
        for behind in range(row.count if row.is_chunk else len(row.tree.parents)):
            place = length + behind
            self._write(one, place, keys[place] if behind < committed else GARBAGE)
        self._lengths[name] = length + committed
        for place in range(length + committed):
            assert self._cells[self._cell(one, place)] == keys[place], f"{one.id} reads another's key at {place}"
        return emitted

    def _write(self, one: Request, place: int, key: int) -> None:
        cell = self._cell(one, place)
        if self._cells.get(cell) != key:
            assert cell[0] not in self.pool.prefixes, "a block that others can find is written to"
            sharing = [other for other in self.scheduler.running if cell[0] in other.blocks]
            assert sharing == [one], "a shared block is written to"
        self._cells[cell] = key

    @staticmethod
    def _cell(one: Request, place: int) -> tuple[int, int]:
        return one.blocks[place // BLOCK_SIZE], place % BLOCK_SIZE

    def _collect(self, row: Row, epoch: int, emitted: int) -> None:
        one = row.request
        if one.finish is not None or one.epoch != epoch:
            return
        one.advance(row.count if row.is_chunk else emitted)
        if not row.emits:
            return
        at = len(one.tokens)
        one.append_output(self._texts[one.id][at : at + emitted])
        assert one.tokens == self._texts[one.id][: len(one.tokens)]
        self.scheduler.reuse.publish(one, min(one.cached, len(one.tokens)))
        if one.finish is not None:
            self.scheduler.release(one)
