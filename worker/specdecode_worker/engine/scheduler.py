"""Who runs in the next step: continuous batching with chunked prefill, first come first served.

Decoding requests run first and leave a share of the token budget to prompts, which also take whatever is left of it.
When blocks run out the youngest request gives its own back and starts again from its tokens: nothing is lost, and the
text does not change. The oldest is never driven out, so there is always one that gets on.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE, BlockPool, blocks_for
from specdecode_worker.engine.kv_cache.prefix_reuse import Reuse
from specdecode_worker.engine.request import Hit, Request
from specdecode_worker.speculation.trees import PLAIN, Tree

PROMPT_SHARE = 8
"""Decoding leaves one in so many tokens of a step to a prompt that could run."""


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
    def begins(self) -> bool:
        """The first chunk since the request was admitted."""
        return self.is_chunk and self.start == self.request.prefix

    @property
    def most_tokens(self) -> int:
        """Most positions that this step commits to the cache."""
        return self.count if self.is_chunk else self.tree.depth + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a batch, as in vLLM. Without ``chunked_prefill`` a prompt runs in one step; one that is longer than
    ``max_num_batched_tokens`` then runs alone, and is the only thing that may break this bound."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True


@dataclass(slots=True)
class Counters:
    """Since the start; the fields of contract.Report."""

    preemptions: int = 0
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


Dispatch = Callable[[Sequence[Request]], list[Tree]]
"""Trees for the decoding requests of a step."""


class Scheduler:
    """Queue, slots and blocks. Rows of a batch: those that choose a token first, then unfinished prefill chunks.

    ``running`` and ``waiting`` are in the order of arrival, and nobody in ``waiting`` is older than the youngest that
    runs, but for those who were preempted.
    """

    def __init__(self, limits: Limits, pool: BlockPool, *, prefix_caching: bool = True, salt: str = "") -> None:
        """``salt`` names the target whose keys the blocks hold."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = Counters()
        self._limits = limits
        self._pool = pool
        self._reuse = Reuse(pool, enabled=prefix_caching, salt=salt)
        self._slots = list(range(limits.max_num_seqs))[::-1]
        self._arrivals = self._turns = 0
        self._held_back = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def prefix_caching(self) -> bool:
        return self._reuse.enabled

    @property
    def blocks(self) -> int:
        """Blocks of the caches, the padding block included."""
        return self._pool.total + 1

    @property
    def kv_tokens_total(self) -> int:
        return self._pool.total * BLOCK_SIZE

    @property
    def kv_tokens_used(self) -> int:
        """Owned by running requests."""
        return self._pool.used * BLOCK_SIZE

    @property
    def kv_tokens_cached(self) -> int:
        """Nobody's, kept for prefix reuse."""
        return self._pool.cached * BLOCK_SIZE

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.order = self._arrivals
        self.waiting.append(request)

    def next_batch(self, dispatch: Dispatch) -> list[Row]:
        """Rows of the next step; may be empty while everything waits for a step in flight."""
        self._reuse.begin_step()
        budget = self._limits.max_num_batched_tokens
        rows = self._decoding(dispatch, budget - self._held_for_prompts())
        self._prefill(budget - sum(row.count for row in rows), rows)
        return sorted(rows, key=lambda row: (not row.chooses, row.is_chunk))

    def drafts_follow(self, follow: bool) -> None:
        """Whether drafts follow the prompts of the next batches: then only beginnings that one has followed will do."""
        self._reuse.drafting = follow

    def publish(self, request: Request, end: int) -> None:
        """The first ``end`` tokens are final, and the step that writes their keys is launched: others may read them."""
        self._reuse.publish(request, end)

    def forget_traffic(self) -> None:
        """Counts from here on."""
        self.counters = Counters()

    def forget_draft(self, identity: str, *, states: bool) -> None:
        """The keys of this draft are gone; and with ``states`` what was kept of the target for all drafts."""
        self._reuse.forget(identity, states=states)

    def release(self, request: Request) -> None:
        """Frees what a finished or aborted request holds, wherever it stands."""
        if request.slot >= 0:
            self._vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def check(self) -> None:
        """Books balance: every slot and block belongs to running requests or is free, or cached for who comes next."""
        self._pool.check([block for request in self.running for block in request.blocks])
        assert len(self._slots) + len(self.running) == self._limits.max_num_seqs, "a slot is lost"

    def _held_for_prompts(self) -> int:
        """Tokens that decoding leaves, so that prompts get on however many decode."""
        wanted = self._wanted_by_prompts()
        if self._limits.chunked_prefill:
            return min(wanted, max(self._limits.max_num_batched_tokens // PROMPT_SHARE, 1))
        return 0 if self._held_back else min(wanted, self._limits.max_num_batched_tokens)

    def _wanted_by_prompts(self) -> int:
        """Tokens of the first prompt that can run in this step."""
        for request in self.running:
            if not request.decoding:
                return request.prefill_end - request.prefilled
        if not self.waiting or not self._slots:
            return 0
        hit = self._reuse.find(self.waiting[0])
        return self._to_prefill(self.waiting[0], hit) if self._fits(self.waiting[0], hit) else 0

    def _decoding(self, dispatch: Dispatch, budget: int) -> list[Row]:
        requests = self._whose_turn(budget)
        rows: list[Row] = []
        budget -= len(requests)
        for request, tree in zip(requests, dispatch(requests) if requests else [], strict=True):
            if request.slot < 0:
                continue  # preempted by a row before
            # A tree that cannot fit beside nobody would only drive everyone else out.
            fits = request.cached_bound + len(tree.parents) <= self.kv_tokens_total
            tree = tree if fits and tree.verified - 1 <= budget else PLAIN
            if self._reserve(request, request.cached_bound + len(tree.parents), rows):
                rows.append(Row(request, tree.verified, tree))
                budget -= tree.verified - 1
        return rows

    def _whose_turn(self, budget: int) -> list[Request]:
        """All who decode; where they are more than tokens, those whose last turn is the longest ago."""
        # What steps in flight may still commit can go beyond the cache; what they do commit cannot.
        ready = [one for one in self.running if one.decoding and one.cached_bound < self.kv_tokens_total]
        self._held_back = len(ready) > budget
        if not self._held_back:
            return ready
        in_turn = sorted(ready, key=lambda one: one.last_turn)[: max(budget, 0)]
        for one in in_turn:
            self._turns += 1
            one.last_turn = self._turns
        return sorted(in_turn, key=lambda one: one.order)

    def _prefill(self, budget: int, rows: list[Row]) -> None:
        """Appends the rows of prompts: the oldest gets what it can use, then the next."""
        for request in [request for request in self.running if not request.decoding]:
            if request.slot >= 0:
                budget -= self._chunk(request, budget, rows)
        while budget > 0 and self.waiting and self._slots:
            request = self.waiting[0]
            hit = self._reuse.find(request)
            if not self._fits(request, hit) or self._reuse.is_coming(request, hit):
                break
            if not self._most_now(self._to_prefill(request, hit), budget, rows):
                break
            self._admit(self.waiting.popleft(), hit)
            budget -= self._chunk(request, budget, rows)

    def _to_prefill(self, request: Request, hit: Hit) -> int:
        return len(request.tokens) - len(hit.blocks) * BLOCK_SIZE

    def _fits(self, request: Request, hit: Hit) -> bool:
        """Whether the whole prompt finds blocks, beside what prompts under way still need.

        Its blocks are taken chunk by chunk, for until then they serve as cached ones, or let others decode. While
        others run one block each is left to them, or the newcomer would be driven out before it said anything.
        """
        missing = blocks_for(len(request.tokens) + 1) - len(hit.blocks)
        resting = sum(self._pool.prefixes.rests(block) for block in hit.blocks)
        promised = sum(self._unfilled(one) for one in self.running if not one.decoding)
        return missing + resting + promised + len(self.running) <= self._pool.available

    def _unfilled(self, request: Request) -> int:
        return max(blocks_for(request.prefill_end + 1) - len(request.blocks), 0)

    def _admit(self, request: Request, hit: Hit) -> None:
        self._pool.share(hit.blocks)
        request.admit(self._slots.pop(), hit)
        insort(self.running, request, key=lambda one: one.order)
        if self._reuse.enabled and request.epoch == 0:
            self.counters.prefix_query_tokens += len(request.submit.prompt)
            self.counters.prefix_hit_tokens += request.cached_tokens

    def _most_now(self, wanted: int, budget: int, rows: Sequence[Row]) -> int:
        """Tokens of a prompt that may run in this step, of ``wanted``."""
        if self._limits.chunked_prefill or wanted <= budget:
            return min(wanted, budget)
        return 0 if rows or wanted <= self._limits.max_num_batched_tokens else wanted

    def _chunk(self, request: Request, budget: int, rows: list[Row]) -> int:
        """The tokens of ``budget`` that go into the next chunk of a prompt."""
        start = request.prefilled
        count = self._most_now(request.prefill_end - start, budget, rows)
        if count <= 0 or not self._reserve(request, start + count, rows):
            return 0
        request.prefilled += count
        self._reuse.fills(request, start, request.prefilled)
        self.counters.prefill_chunks += 1
        rows.append(Row(request, count, start=start, chooses=request.decoding))
        return count

    def _reserve(self, request: Request, keys: int, rows: Sequence[Row]) -> bool:
        """Blocks for ``keys`` keys; preempts younger ones that have no row yet, the youngest first. False when that is
        not enough: it stands still in this step, while others use what it lacks."""
        missing = blocks_for(keys) - len(request.blocks)
        while missing > 0:
            after = request.blocks[-1] if request.blocks else None
            taken = self._pool.take(missing, after=after, room=self._unfilled(request))
            if taken is not None:
                request.blocks += taken
                return True
            in_batch = {row.request.id for row in rows}
            victim = next(other for other in reversed(self.running) if other.id not in in_batch)
            if victim is request:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.forget_cache()
        older = sum(one.order < request.order for one in self.waiting)
        self.waiting.insert(older, request)
        self.counters.preemptions += 1

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.give_back(request.blocks)
        self._slots.append(request.slot)
        request.slot, request.blocks = -1, []
