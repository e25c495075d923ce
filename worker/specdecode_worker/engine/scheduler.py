"""Who runs in the next step: continuous batching with chunked prefill, first come first served.

Decoding requests all run, then prompts take what is left of the token budget. When blocks run out the youngest
request gives its own back and starts again from its tokens: nothing is lost, and the text does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.engine.blocks import BLOCK_SIZE, BlockPool
from specdecode_worker.engine.request import Request
from specdecode_worker.speculation.trees import PLAIN, Tree


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: ``count`` packed tokens, a prefill chunk from ``start`` or the nodes of a tree.
    ``chooses`` says that a token comes out: always, but for a chunk that does not end its prompt."""

    request: Request
    count: int
    tree: Tree = PLAIN
    start: int = -1
    chooses: bool = True

    @property
    def is_chunk(self) -> bool:
        return self.start >= 0

    @property
    def most_tokens(self) -> int:
        """Most positions that this step commits to the cache."""
        return self.count if self.is_chunk else self.tree.depth + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a batch, as in vLLM."""

    max_num_seqs: int
    max_num_batched_tokens: int


Dispatch = Callable[[Sequence[Request]], list[Tree]]
"""Trees for the decoding requests of a step."""


class Scheduler:
    """Queue, slots and blocks. Rows of a batch: those that choose a token first, then unfinished prefill chunks."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._limits = limits
        self._pool = pool
        self._slots = list(range(limits.max_num_seqs))[::-1]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def kv_tokens_total(self) -> int:
        return self._pool.total * BLOCK_SIZE

    @property
    def kv_tokens_used(self) -> int:
        return self._pool.used * BLOCK_SIZE

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next_batch(self, dispatch: Dispatch) -> list[Row]:
        """Rows of the next step; may be empty while everything waits for a step in flight."""
        rows = self._decoding(dispatch)
        budget = self._limits.max_num_batched_tokens - sum(row.count for row in rows)
        rows += self._prefilling(budget)
        return sorted(rows, key=lambda row: (not row.chooses, row.is_chunk))

    def release(self, request: Request) -> None:
        """Frees what a finished or aborted request holds, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.slot >= 0:
            self._vacate(request)

    def check(self) -> None:
        """Books balance: every slot and block belongs to one running request or is free."""
        self._pool.check([block for request in self.running for block in request.blocks])
        assert len(self._slots) + len(self.running) == self._limits.max_num_seqs, "a slot is lost"

    def _decoding(self, dispatch: Dispatch) -> list[Row]:
        requests = [request for request in self.running if request.decoding]
        rows: list[Row] = []
        budget = self._limits.max_num_batched_tokens - len(requests)
        for request, tree in zip(requests, dispatch(requests) if requests else [], strict=True):
            if request.slot < 0:
                continue  # preempted by a row before
            # A tree that cannot fit beside nobody would only drive the request out of its own blocks, again and again.
            fits = request.cached_bound + len(tree.parents) <= self.kv_tokens_total
            tree = tree if fits and tree.verified - 1 <= budget else PLAIN
            if self._reserve(request, request.cached_bound + len(tree.parents), rows):
                rows.append(Row(request, tree.verified, tree))
                budget -= tree.verified - 1
        return rows

    def _prefilling(self, budget: int) -> list[Row]:
        rows: list[Row] = []
        for request in [request for request in self.running if not request.decoding]:
            budget -= self._chunk(request, budget, rows)
        while budget > 0 and self.waiting and self._slots:
            request = self.waiting[0]
            blocks = self._pool.take(-(-(len(request.tokens) + 1) // BLOCK_SIZE))
            if blocks is None:
                break
            self._admit(self.waiting.popleft(), blocks)
            budget -= self._chunk(request, budget, rows)
        return rows

    def _admit(self, request: Request, blocks: list[int]) -> None:
        request.slot, request.blocks = self._slots.pop(), blocks
        request.prefilled, request.prefill_end = 0, len(request.tokens)
        self.running.append(request)

    def _chunk(self, request: Request, budget: int, rows: list[Row]) -> int:
        count = min(budget, request.prefill_end - request.prefilled)
        if count <= 0:
            return 0
        start = request.prefilled
        request.prefilled += count
        rows.append(Row(request, count, start=start, chooses=request.decoding))
        return count

    def _reserve(self, request: Request, keys: int, rows: list[Row]) -> bool:
        """Blocks for ``keys`` keys; preempts the youngest that has no row yet. False when ``request`` itself went."""
        missing = -(-keys // BLOCK_SIZE) - len(request.blocks)
        while missing > 0:
            taken = self._pool.take(missing, after=request.blocks[-1])
            if taken is not None:
                request.blocks += taken
                return True
            in_batch = {id(row.request) for row in rows}
            victim = next(other for other in reversed(self.running) if id(other) not in in_batch)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.forget_cache()
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.give_back(request.blocks)
        self._slots.append(request.slot)
        request.slot, request.blocks = -1, []
