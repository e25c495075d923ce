"""Scheduler of the next step: continuous batching with chunked prefill, first come first served.

Decoding requests run first and leave a share of the token budget to prompts, which also use what decoding leaves over.
With chunked prefill, long prompts leave a share of the prompt budget to short ones (queueing/prompt_shares.py): a
waiting short prompt may overtake a long one as long as another long prompt is in progress. The oldest waiting long
prompt is next once none is in progress, and then nothing overtakes it. Requests of several clients wait in turn
(queueing/waiting_queue.py).

When blocks run out, the youngest request is preempted: it gives its blocks back and later recomputes its keys from its
tokens, so no token is lost and the text does not change. The oldest request is never preempted, which guarantees
progress.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.engine.batch import Batch, Row
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE, BlockPool, blocks_for
from specdecode_worker.engine.kv_cache.prefix_reuse import PrefixReuse
from specdecode_worker.engine.queueing.prompt_shares import PrefillLimit, share_prompt_budget, short_prompt_tokens
from specdecode_worker.engine.queueing.waiting_queue import WaitingQueue
from specdecode_worker.engine.request import CachedPrefix, Request
from specdecode_worker.engine.shape_selector import Selection
from specdecode_worker.speculation.trees import PLAIN, Tree

PROMPT_SHARE = 8
"""Decoding leaves 1/PROMPT_SHARE of the token budget of a step to prompts that can run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a batch, named as in vLLM.

    Without ``chunked_prefill`` a prompt runs in one step; a prompt longer than ``max_num_batched_tokens`` then runs in
    a step of its own, the only case that may exceed this bound.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True


@dataclass(slots=True)
class Counters:
    """Counters since the start or the last reset, with the names of ``contract.Report``."""

    preemptions: int = 0
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


Dispatch = Callable[[Sequence[Request]], Selection]
"""Function that selects the draft trees of the decoding requests of a step."""


class Scheduler:
    """Owner of the request queue, the slots and the cache blocks.

    A batch lists decoding rows first, then the chunks that end a prompt and choose a token, then other chunks.
    ``running`` is in the order of arrival.
    """

    def __init__(
        self, limits: Limits, pool: BlockPool, *, prefix_caching: bool = True, salt: str = "", timed: bool = False
    ) -> None:
        """Start with an empty queue.

        Args:
            limits: Bounds of a batch.
            pool: Pool of cache blocks.
            prefix_caching: Reuse cached blocks of equal prefixes.
            salt: Identity of the target, part of every block digest.
            timed: Step times will be recorded. The first prompt then starts with a small chunk, which is measured.
        """
        self._short = short_prompt_tokens(limits.max_num_batched_tokens)
        self.waiting = WaitingQueue(self._short)
        self.running: list[Request] = []
        self.counters = Counters()
        self._limits = limits
        self._prompt_share = max(limits.max_num_batched_tokens // PROMPT_SHARE, 1)
        self._prefill_limit = PrefillLimit(limits.max_num_batched_tokens, self._prompt_share, timed=timed)
        self._pool = pool
        self._reuse = PrefixReuse(pool, enabled=prefix_caching, salt=salt)
        self._slots = list(range(limits.max_num_seqs))[::-1]
        self._arrivals = self._turns = 0
        self._decoding_took_turns = False

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and not self.running

    @property
    def prefix_caching(self) -> bool:
        """True if cached blocks of equal prefixes are reused."""
        return self._reuse.enabled

    @property
    def blocks(self) -> int:
        """Number of blocks of the caches, including the padding block."""
        return self._pool.total + 1

    @property
    def kv_tokens_total(self) -> int:
        """Capacity of the cache in tokens."""
        return self._pool.total * BLOCK_SIZE

    @property
    def kv_tokens_used(self) -> int:
        """Tokens of the blocks that running requests own."""
        return self._pool.used * BLOCK_SIZE

    @property
    def kv_tokens_cached(self) -> int:
        """Tokens of the blocks without an owner that are kept for prefix reuse."""
        return self._pool.cached * BLOCK_SIZE

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self._arrivals += 1
        request.order = self._arrivals
        self._enqueue(request)

    def next_batch(self, dispatch: Dispatch) -> Batch:
        """Return the next batch. It has no rows if no request can run, e.g. before a step in flight is collected.

        Admits waiting requests, takes cache blocks and may preempt requests.

        Args:
            dispatch: Selects the draft trees of the decoding requests.
        """
        self._reuse.begin_step()
        budget = self._limits.max_num_batched_tokens
        prompts = [request for request in self.running if request.prefilled < request.prefill_end]
        decoding_budget = budget - self._prompt_reserve(prompts)
        requests = self._select_decoding(decoding_budget)
        selection = dispatch(requests) if requests else Selection()
        rows = self._decoding(requests, selection.trees, decoding_budget)
        decoding = len(rows)
        self._prefill(prompts, budget - sum([row.count for row in rows]), rows)
        if len(rows) > decoding:
            rows.sort(key=lambda row: (not row.emits, row.is_chunk))
        return Batch(rows, selection.choice)

    def set_draft_prefill(self, draft_prefill: bool) -> None:
        """Set whether drafts process the prompts of the next batches.

        If they do, only cached prefixes that a draft has processed too are reused.
        """
        self._reuse.draft_prefill = draft_prefill

    def publish(self, request: Request, end: int) -> None:
        """Make the full blocks of the first ``end`` tokens available to other requests.

        These tokens must be final, and the step that writes their keys must have been launched.
        """
        self._reuse.publish(request, end)

    def record_step_time(self, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step with ``prompt_tokens`` tokens of prompts, which bounds later chunks."""
        self._prefill_limit.record_step(prompt_tokens, seconds)

    def reset_traffic(self) -> None:
        """Reset the counters."""
        self.counters = Counters()

    def forget_draft(self, identity: str, *, states: bool) -> None:
        """Invalidate the cached keys of a draft.

        Args:
            identity: Hash of the draft.
            states: Also invalidate the cached hidden states of the target that drafts read.
        """
        self._reuse.forget(identity, states=states)

    def release(self, request: Request) -> None:
        """Remove a finished or cancelled request, running or waiting, and free its slot and blocks."""
        if request.slot >= 0:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        self.waiting.charge_output(request)

    def check(self) -> None:
        """Check that every slot is owned or free and that every block is owned, cached or free."""
        self._pool.check([block for request in self.running for block in request.blocks])
        assert len(self._slots) + len(self.running) == self._limits.max_num_seqs, "a slot is lost"

    def _prompt_reserve(self, prompts: Sequence[Request]) -> int:
        """Return the tokens of the budget that decoding leaves to prompts, so that decoding cannot starve them.

        Without chunked prefill the next prompt needs all of its tokens in one step. They are reserved, except in a step
        that follows one in which decoding requests had to take turns.
        """
        in_progress = [request.prefill_end - request.prefilled for request in prompts]
        if self._limits.chunked_prefill:
            wanted = sum(in_progress)
            return min(wanted if wanted >= self._prompt_share else wanted + self._first_waiting_tokens(),
                       self._prompt_share)  # fmt: skip
        if self._decoding_took_turns:
            return 0
        wanted = in_progress[0] if in_progress else self._first_waiting_tokens()
        return min(wanted, self._limits.max_num_batched_tokens)

    def _first_waiting_tokens(self) -> int:
        """Return the number of tokens to prefill of the next waiting request, 0 if it cannot run in this step."""
        request = self.waiting.first() if self._slots else None
        if request is None:
            return 0
        hit = self._reuse.find_next(request)
        return self._to_prefill(request, hit) if self._fits(request, hit) else 0

    def _decoding(self, requests: Sequence[Request], trees: Sequence[Tree], budget: int) -> list[Row]:
        """Return the rows of decoding requests; a tree that does not fit into the budget is replaced by one token."""
        rows: list[Row] = []
        kv_tokens_total = self.kv_tokens_total
        budget -= len(requests)
        for request, tree in zip(requests, trees, strict=True):
            if request.slot < 0:
                continue  # An earlier row preempted this request.
            # A tree too large for the whole cache would preempt every other request and still not fit.
            bound = request.cached_bound
            fits = bound + len(tree.parents) <= kv_tokens_total
            tree = tree if fits and tree.verified - 1 <= budget else PLAIN
            keys = bound + len(tree.parents)
            if keys <= len(request.blocks) * BLOCK_SIZE or self._reserve(request, keys, rows):
                rows.append(Row(request, tree.verified, tree))
                budget -= tree.verified - 1
        return rows

    def _select_decoding(self, budget: int) -> list[Request]:
        """Return the requests that decode in this step, oldest first.

        If there are more than ``budget``, those with the earliest last turn are chosen.
        """
        # The upper bound of a request's keys can exceed the cache while steps are in flight; such a request waits until
        # one is collected.
        total = self.kv_tokens_total
        ready = [
            one
            for one in self.running
            if one.prefilled == one.prefill_end and one.cached_bound < total and one.can_launch
        ]
        self._decoding_took_turns = len(ready) > budget
        if not self._decoding_took_turns:
            return ready
        in_turn = sorted(ready, key=lambda one: one.last_turn)[: max(budget, 0)]
        for one in in_turn:
            self._turns += 1
            one.last_turn = self._turns
        return sorted(in_turn, key=lambda one: one.order)

    def _prefill(self, prompts: Sequence[Request], budget: int, rows: list[Row]) -> None:
        """Append the rows of prefill chunks and admit waiting requests while tokens remain."""
        if not prompts and not self.waiting:
            return
        remaining = [request.prefill_end - request.prefilled for request in prompts]
        shares = remaining
        if self._limits.chunked_prefill:
            budget = min(budget, self._prefill_limit.tokens)
            shares = share_prompt_budget(remaining, self._waiting_short_tokens(), budget, self._short)
        for request, share in zip(prompts, shares, strict=True):
            if request.slot >= 0:
                budget -= self._chunk(request, min(share, budget), rows)
        self._admit_waiting(budget, rows)

    def _admit_waiting(self, budget: int, rows: list[Row]) -> None:
        """Admit waiting requests and append their first chunks, as long as tokens, slots and blocks suffice.

        Long prompts are skipped while another long prompt is in progress. A request that does not fit, or whose prefix
        is being computed in this step, is not overtaken.
        """
        if not self.waiting or not self._slots:
            return
        chunked = self._limits.chunked_prefill
        skip_long = chunked and any(one.prefill_end - one.prefilled > self._short for one in self.running)
        while budget > 0 and self._slots:
            request = self.waiting.first(skip_long=skip_long)
            if request is None:
                break
            hit = self._reuse.find_next(request)
            if not self._fits(request, hit) or self._reuse.is_being_filled(request, hit):
                break
            wanted = share = self._to_prefill(request, hit)
            if not self._chunk_size(wanted, budget, rows):
                break
            self.waiting.admit(request)
            self._admit(request, hit)
            if chunked:
                (share,) = share_prompt_budget([wanted], self._waiting_short_tokens(), budget, self._short)
                skip_long = skip_long or wanted - share > self._short
            budget -= self._chunk(request, min(share, budget) if chunked else budget, rows)

    def _waiting_short_tokens(self) -> int:
        """Return the expected tokens of the short prompts that may be admitted in this step."""
        return self.waiting.short_tokens if self._slots else 0

    def _to_prefill(self, request: Request, hit: CachedPrefix) -> int:
        """Return the number of tokens that a waiting request has to prefill."""
        return len(request.tokens) - len(hit.blocks) * BLOCK_SIZE

    def _fits(self, request: Request, hit: CachedPrefix) -> bool:
        """Return whether the blocks suffice for the whole prompt in addition to the prompts in progress.

        A prompt takes its blocks chunk by chunk; until then they stay cached or serve decoding requests. One block is
        reserved for each running request: without it the new request could be preempted before its first token.
        """
        missing = blocks_for(len(request.tokens) + 1) - len(hit.blocks)
        reserved = sum(self._unfilled(one) for one in self.running if not one.decoding)
        return missing + hit.unowned + reserved + len(self.running) <= self._pool.available

    def _unfilled(self, request: Request) -> int:
        """Return the number of blocks that the prefill of a running request still needs."""
        return max(blocks_for(request.prefill_end + 1) - len(request.blocks), 0)

    def _admit(self, request: Request, hit: CachedPrefix) -> None:
        """Move a request to the running ones and share the blocks of its cached prefix."""
        self._pool.share(hit.blocks)
        request.admit(self._slots.pop(), hit)
        insort(self.running, request, key=lambda one: one.order)
        if self._reuse.enabled and request.epoch == 0:
            self.counters.prefix_query_tokens += len(request.submit.prompt)
            self.counters.prefix_hit_tokens += request.cached_tokens

    def _chunk_size(self, wanted: int, budget: int, rows: Sequence[Row]) -> int:
        """Return how many of the ``wanted`` tokens of a prompt may run in this step."""
        if self._limits.chunked_prefill or wanted <= budget:
            return min(wanted, budget)
        return 0 if rows or wanted <= self._limits.max_num_batched_tokens else wanted

    def _chunk(self, request: Request, budget: int, rows: list[Row]) -> int:
        """Append the next chunk of a prompt to ``rows`` and return its number of tokens, 0 if it cannot run."""
        start = request.prefilled
        count = self._chunk_size(request.prefill_end - start, budget, rows)
        if count <= 0 or not self._reserve(request, start + count, rows):
            return 0
        request.prefilled += count
        self._reuse.record_chunk(request, start, request.prefilled)
        self.counters.prefill_chunks += 1
        rows.append(Row(request, count, start=start, emits=request.decoding))
        return count

    def _reserve(self, request: Request, keys: int, rows: Sequence[Row]) -> bool:
        """Take blocks until the request can hold ``keys`` keys; return whether that succeeded.

        If blocks run out, the youngest requests without a row in this step are preempted. If ``request`` is itself the
        youngest of these, it skips the step instead.
        """
        missing = blocks_for(keys) - len(request.blocks)
        while missing > 0:
            after = request.blocks[-1] if request.blocks else None
            taken = self._pool.allocate(missing, after=after, room=self._unfilled(request))
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
        """Take the slot and the blocks of a running request and put it back into the queue by its order of arrival."""
        self._vacate(request)
        request.forget_cache()
        self._enqueue(request)
        self.counters.preemptions += 1

    def _enqueue(self, request: Request) -> None:
        """Add a new or preempted request to the queue, as a short or a long prompt."""
        request.expected_prefill = self._to_prefill(request, self._reuse.find(request))
        self.waiting.add(request)

    def _vacate(self, request: Request) -> None:
        """Free the slot and the blocks of a running request."""
        self.running.remove(request)
        self._pool.release(request.blocks)
        self._slots.append(request.slot)
        request.slot, request.blocks = -1, []
