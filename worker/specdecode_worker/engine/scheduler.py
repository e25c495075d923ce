"""Continuous batching: order of the waiting requests, prefix reuse, chunked prefill, preemption, and deadlines."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Literal
from weakref import WeakKeyDictionary

from specdecode_worker.core.kv_cache import (
    BLOCK_SIZE,
    BlockPool,
    CachedPrefix,
    blocks_for,
    extend_digests,
    root_digest,
    salted_root,
)
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import Choice, Request, Row, Selection, blocked_tokens
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.guided.guide import GrammarRefused, Guide, library_message
from specdecode_worker.sampling.trees import PLAIN, Tree

# Prefix reuse: lookup of cached blocks for a new request and publication of its own full blocks.
#
# A block is published once the step that fills it has been launched, which is safe because the device runs steps in
# order and readers are launched later. A published block is never written again. The block with the last prompt token
# is never reused, because the logits of that token are needed.
#
# The salt of a request is part of the digest of its first block, and so of every block. Keys of drafts and hidden
# states of the target are found through the same blocks, so requests with different salts share none of them.

_STATES = "states"
"""Mark of blocks with stored hidden states of their last token. It cannot collide with a draft's mark, a hash."""
_FOLLOWED = "followed"
"""Mark of blocks that any draft has processed, even one that was replaced since."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Indexed block of a text.

    ``draft`` and ``states``: keys of the request's draft, and states of the target, are valid. ``followed``: some draft
    has processed the block.
    """

    block: int
    digest: bytes
    draft: bool
    states: bool
    followed: bool


RENEW_EVERY = 4
"""Of the requests that find a prefix without keys of their draft, every so many-th computes it once more.

A draft drafts worse behind a prefix that it cannot see. After a swap, a prefix of many requests soon has the new
draft's keys, and those of single conversations cost a quarter of the prefill that a cold cache would.
"""


@dataclass(slots=True)
class _KnownHit:
    """Cached prefix of a waiting request, and what it was found by.

    ``watched`` are the digests of the entries that the search read, the missing one at its end included.
    """

    hit: CachedPrefix
    asked: tuple[int, str, bool]
    """Number of tokens, draft, and whether drafts process prompts."""
    watched: frozenset[bytes]
    version: int


class PrefixReuse:
    """Prefix reuse of one scheduler. If disabled, no block is found or published."""

    def __init__(self, pool: BlockPool, *, enabled: bool, salt: str) -> None:
        """Work on the blocks of ``pool``. ``salt`` identifies the target that computes the keys."""
        self.enabled = enabled
        self._pool, self._index = pool, pool.prefixes
        self.draft_prefill = False
        """True if drafts process the prompts of the next batches.

        If they do, only cached prefixes that a draft has processed too are reused, and those that were cached while no
        draft ran are computed once more; otherwise the draft could never see these prefixes.
        """
        self._root = root_digest(salt)
        self._filling: set[bytes] = set()
        self._unseen = 0
        self._known: WeakKeyDictionary[Request, _KnownHit] = WeakKeyDictionary()
        """Hits of the last requests that were next, of which there are two: the first, and the first short prompt."""

    def begin_step(self) -> None:
        """Start collecting the blocks that the chunks of a new step fill."""
        self._filling.clear()

    def find_next(self, request: Request) -> CachedPrefix:
        """Return what `find` returns for a request that is next in the queue.

        While it cannot be admitted it is asked for in every step, so the search is not repeated before an entry changes
        that it read.
        """
        known = self._known.get(request)
        if known is not None and self._is_current(request, known):
            return known.hit
        self._known.pop(request, None)
        version, hit = self._index.version, self.find(request)
        most = self._max_reusable_blocks(request)
        watched = frozenset(request.digests[: min(hit.indexed + 1, most)])
        self._known[request] = _KnownHit(hit, self._asked(request), watched, version)
        if len(self._known) > 2:
            del self._known[next(iter(self._known))]
        return hit

    def _is_current(self, request: Request, known: _KnownHit) -> bool:
        """Return whether a search would return the same hit once more."""
        if known.asked != self._asked(request):
            return False
        changes = self._index.changes_since(known.version)
        if changes is None or not known.watched.isdisjoint(changes):
            return False
        known.version = self._index.version
        return True

    def _asked(self, request: Request) -> tuple[int, str, bool]:
        return len(request.tokens), request.draft.draft, self.draft_prefill

    def find(self, request: Request) -> CachedPrefix:
        """Return the cached prefix of a request, which ends before the block with the last token to prefill."""
        most = self._max_reusable_blocks(request)
        blocks = self._index.find(self.digests(request, most)[:most])
        indexed = len(blocks)
        if self.draft_prefill and request.draft.draft:
            blocks = self._visible(request, blocks)
        marked = [self._index.is_marked(block, request.draft.draft) for block in blocks]
        if marked[-2:] == [True, False]:
            # The block's first owner ended before the draft had caught up with this last block. Computing one block
            # again costs less than a draft that cannot see any of the prefix.
            blocks, marked = blocks[:-1], marked[:-1]
        drafted = next((i for i, is_marked in enumerate(reversed(marked)) if not is_marked), len(marked))
        has_state = not blocks or self._index.is_marked(blocks[-1], _STATES)
        unowned = sum(map(self._index.is_unowned, blocks))
        return CachedPrefix(blocks, drafted, has_state, unowned, indexed)

    def is_being_filled(self, request: Request, hit: CachedPrefix) -> bool:
        """Return whether a chunk of the step under construction fills the block that ``request`` needs next.

        The caller then delays the request by one step, after which the block is found in the cache.
        """
        after = len(hit.blocks)
        return after < self._max_reusable_blocks(request) and request.digests[after] in self._filling

    def record_chunk(self, request: Request, start: int, end: int) -> None:
        """Record that a chunk of this step computes the tokens from ``start`` to ``end`` of the request."""
        if self.enabled:
            whole = end // BLOCK_SIZE
            self._filling.update(self.digests(request, whole)[start // BLOCK_SIZE : whole])

    def publish(self, request: Request, end: int) -> None:
        """Register the full blocks of the first ``end`` tokens and mark those with valid keys of the draft.

        These tokens must be final, and the step that writes their keys must have been launched.
        """
        if not self.enabled:
            return
        whole = end // BLOCK_SIZE
        if whole > request.published:
            digests = self.digests(request, whole)
            for k in range(request.published, whole):
                self._replace_useless(digests[k], request.draft.draft)
                self._pool.register(request.blocks[k], digests[k], digests[k - 1] if k else request.digest_root)
                self._index.mark(request.blocks[k], _STATES)
            request.published = whole
        while request.marked < request.published and request.drafted >= (request.marked + 1) * BLOCK_SIZE:
            first = max(request.marked * BLOCK_SIZE, 1)  # ``start`` is at least 1: EAGLE drafts have no slot 0.
            if request.draft.draft and request.draft.start <= first:
                self._index.mark(request.blocks[request.marked], request.draft.draft, _FOLLOWED)
            request.marked += 1

    def stored(self, request: Request, first: int, end: int) -> list[StoredBlock]:
        """Return the indexed blocks of a request's text from number ``first`` on, without a gap, before ``end``."""
        found = []
        for digest in self.digests(request, end)[first:end]:
            block = self._index.holder(digest)
            if block is None:
                break
            marks = [self._index.is_marked(block, name) for name in (request.draft.draft, _STATES, _FOLLOWED)]
            found.append(StoredBlock(block, digest, *marks))
        return found

    def adopt(
        self, request: Request, first: int, count: int, room: int, *, draft: str, states: bool, followed: bool
    ) -> dict[int, int] | None:
        """Register blocks of a request's text that another worker has computed.

        They have no owner, so that they are evicted as others are. The caller writes their contents before anything
        else runs.

        Args:
            request: The request.
            first: Number of the first block within the text.
            count: Number of blocks.
            room: Number of blocks that the rest of the text needs, these included.
            draft: Draft whose keys they have; empty for none.
            states: They have the target's states.
            followed: Some draft has processed them.

        Returns:
            Cache block by number within the text, of those that are to be written; the others are known already. None
            if there is no room.
        """
        digests = self.digests(request, first + count)
        for digest in digests[first : first + count]:
            self._replace_useless(digest, draft)
        missing = [k for k in range(first, first + count) if self._index.holder(digests[k]) is None]
        blocks = self._pool.allocate(len(missing), self._index.holder(digests[first - 1]) if first else None, room)
        if blocks is None:
            return None
        for k, block in zip(missing, blocks, strict=True):
            self._pool.register(block, digests[k], digests[k - 1] if k else request.digest_root)
            for name, is_valid in ((draft, bool(draft)), (_STATES, states), (_FOLLOWED, followed)):
                if is_valid:
                    self._index.mark(block, name)
        self._pool.release(blocks)
        return dict(zip(missing, blocks, strict=True))

    def forget(self, identity: str, *, states: bool) -> None:
        """Invalidate the cached keys of a draft and, with ``states``, the stored hidden states of the target.

        Args:
            identity: Hash of the draft.
            states: Also invalidate the cached hidden states of the target that drafts read.
        """
        self._index.forget_marks(identity)
        if states:
            self._index.forget_marks(_STATES)

    def _visible(self, request: Request, blocks: list[int]) -> list[int]:
        """Return the blocks to reuse: those that a draft has processed, or those that the request's own draft sees."""
        seen = list(takewhile(lambda block: self._index.is_marked(block, request.draft.draft), blocks))
        if len(seen) < len(blocks) and self._renews(request):
            return seen
        return list(takewhile(lambda block: self._index.is_marked(block, _FOLLOWED), blocks))

    def _renews(self, request: Request) -> bool:
        """Return whether this request computes a prefix once more that its draft cannot see."""
        if request.renews_prefix is None:
            self._unseen += 1
            request.renews_prefix = self._unseen % RENEW_EVERY == 0
        return request.renews_prefix

    def _replace_useless(self, digest: bytes, draft: str) -> None:
        """Remove the block for ``digest`` from the index if it has no keys of ``draft``.

        The same text can then be registered with a block that has these keys. Requests that own the old block keep it.
        The draft of an owner may still reach a block that no draft has processed, so such a block stays.
        """
        known = self._index.holder(digest)
        if known is None or not draft or self._index.is_marked(known, draft):
            return
        if self._index.is_unowned(known):
            self._pool.evict(known)
        elif self._index.is_marked(known, _FOLLOWED):
            self._index.drop(known)

    def _max_reusable_blocks(self, request: Request) -> int:
        """Return how many leading blocks may be reused; 0 for prompt logprobs, which need a full prefill."""
        if not self.enabled or request.submit.sampling.prompt_logprobs is not None:
            return 0
        return blocks_for(len(request.tokens)) - 1

    def digests(self, request: Request, count: int) -> list[bytes]:
        """Return at least the first ``count`` block digests of the request, computing missing ones."""
        if not request.digest_root:
            request.digest_root = salted_root(self._root, request.submit.cache_salt)
        extend_digests(request.digests, request.tokens, count, request.digest_root, BLOCK_SIZE)
        return request.digests


# Queue of waiting requests: clients take turns by the tokens they used; within a client, first come first served.
#
# A client's tokens are divided by its weight, so that clients of routers keep the shares that the routers gave them.
#
# Turns follow start-time fair queueing (Goyal et al. 1996) with the token costs of VTC (Sheng et al. 2024). The client
# with the fewest tokens is next. A client that was absent starts at the level of the client served last, so that it
# neither saves up turns nor waits for the others. With one client the order is the order of arrival.

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


# Division of a step's prompt budget between prompts: short prompts do not wait for long ones, and none starves.
#
# Prompts form two lanes by the number of tokens left to prefill. The oldest long prompts keep half of the budget, short
# prompts get the other half, and each lane may use what the other one leaves. Within a lane prompts are served in order
# of arrival. Equal shares for all prompts would instead delay every long prompt to the end of the last one.

LONG_SHARE = 2
"""Long prompts keep 1/LONG_SHARE of the prompt budget of a step, so they take at most twice as long as alone."""
SHORT_PROMPT_TOKENS = 512
"""Most tokens left to prefill of a short prompt. At least eight such prompts fit the step of a large GPU."""
STEP_SECONDS = 0.25
"""Time that a step with prompt chunks should take at most, in seconds.

A request behind a long prompt waits for about one such step, and its tokens then come at this interval. The value keeps
a short answer well below four seconds where a full step takes longer, i.e. on a CPU. A GPU never reaches it.
"""


def short_prompt_tokens(max_num_batched_tokens: int) -> int:
    """Return the most tokens left to prefill of a short prompt, for steps of this token budget."""
    return min(SHORT_PROMPT_TOKENS, max(max_num_batched_tokens // LONG_SHARE, 1))


def share_prompt_budget(remaining: Sequence[int], waiting_short_tokens: int, budget: int, short: int) -> list[int]:
    """Return the tokens that each prompt in progress may prefill in a step.

    Args:
        remaining: Tokens left to prefill of the prompts in progress, oldest first.
        waiting_short_tokens: Tokens of the short prompts that may be admitted in this step.
        budget: Tokens that prompts may use in this step.
        short: Most tokens left to prefill of a short prompt.
    """
    shares = [0] * len(remaining)
    reserved_for_long = min(sum(tokens for tokens in remaining if tokens > short), -(-budget // LONG_SHARE))
    left = budget - reserved_for_long
    for index, tokens in enumerate(remaining):
        if tokens <= short:
            shares[index] = min(tokens, left)
            left -= shares[index]
    left += reserved_for_long - min(waiting_short_tokens, left)
    for index, tokens in enumerate(remaining):
        if tokens > short:
            shares[index] = min(tokens, left)
            left -= shares[index]
    return shares


class PrefillLimit:
    """Limit of the prompt tokens of a step that keeps its duration near STEP_SECONDS.

    The limit follows the measured steps. Text does not depend on it, because it does not depend on the batch.
    """

    def __init__(self, most: int, least: int, *, timed: bool = False) -> None:
        """Start without a measurement.

        Args:
            most: Token budget of a step, which is the limit until a step was measured.
            least: Smallest limit.
            timed: Start with ``least`` instead, so that the first prompt causes no long step.
        """
        self.tokens = least if timed else most
        self.token_seconds = 0.0
        """Time for one prompt token, in the faster one of the last two steps; 0 without a measurement."""
        self._most, self._least = most, least
        self._recent: deque[float] = deque(maxlen=2)

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """Update the limit from the duration of a step with ``prompt_tokens`` tokens of prompts.

        Smaller steps than ``least`` are ignored: most of their time does not depend on the prompt tokens. Of two steps
        the faster one counts, so that one interrupted step does not lower the limit.
        """
        if prompt_tokens < self._least or seconds <= 0:
            return
        self._recent.append(seconds / prompt_tokens)
        self.token_seconds = min(self._recent)
        self.tokens = min(max(int(STEP_SECONDS / self.token_seconds), self._least), self._most)


# Deadlines of requests, ordered by time, so that a step checks only the earliest one.

Reason = Literal["deadline", "queue_timeout"]

_REBUILD_ENTRIES = 1024
"""Size from which entries of ended requests are removed. Below it they cost less than the removal."""


class Deadlines:
    """Deadlines of all requests of an engine. The caller passes the time, in seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Reason]] = []
        self._rebuild_at = _REBUILD_ENTRIES

    def add(self, submit: Submit, alive: Container[str]) -> None:
        """Add the deadlines of a new request. ``alive`` has the ids of all requests that have not ended."""
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
            self._rebuild_at = max(2 * len(self._heap), _REBUILD_ENTRIES)
        if submit.deadline_seconds:
            heapq.heappush(self._heap, (submit.deadline_seconds, submit.request_id, "deadline"))
        if submit.queue_deadline_seconds:
            heapq.heappush(self._heap, (submit.queue_deadline_seconds, submit.request_id, "queue_timeout"))

    def pop_expired(self, now: float) -> list[tuple[str, Reason]]:
        """Remove and return the requests whose deadline has passed, earliest first. Some may have ended already."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._heap)
            expired.append((request_id, reason))
        return expired


# Queue of requests whose grammars are being compiled, in a thread, so that steps of other requests go on.


class GrammarQueue:
    """Requests that wait for their grammars. They join the scheduler's queue once these are compiled."""

    def __init__(self, compiler: GrammarCompiler | None, eos_token_ids: tuple[int, ...]) -> None:
        """Create an empty queue. Without a compiler no request may have a grammar."""
        self._compiler, self._eos_token_ids = compiler, eos_token_ids
        self._waiting: dict[str, tuple[Request, Future[Guide]]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        """Executor that starts its thread for the first request."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting

    def add(self, request: Request) -> None:
        """Start the compilation of a request's grammar.

        Raises:
            ValueError: This engine has no tokenizer, so it cannot follow a grammar.
        """
        compiler, sampling = self._compiler, request.submit.sampling
        if compiler is None:
            raise ValueError("this engine has no tokenizer, so answers cannot follow a grammar")
        blocked = blocked_tokens(request.submit, self._eos_token_ids)

        def compile_grammar() -> Guide:
            return compiler.guide(sampling.grammar, min_tokens=sampling.min_tokens, blocked=blocked)

        self._waiting[request.id] = request, self._thread.submit(compile_grammar)

    def discard(self, request: Request) -> None:
        """Remove a cancelled request. A compilation under way ends by itself."""
        _, future = self._waiting.pop(request.id)
        future.cancel()

    def take_ready(self, wait_seconds: float = 0.0) -> Iterator[tuple[Request, str]]:
        """Remove the requests whose compilations have ended, and yield each with the reason of a refusal.

        The reason is empty for a request that can run; its ``guide`` is set.

        Args:
            wait_seconds: Time to wait for the first one.
        """
        if wait_seconds and self._waiting:
            wait([future for _, future in self._waiting.values()], wait_seconds, return_when="FIRST_COMPLETED")
        for request, future in [pair for pair in self._waiting.values() if pair[1].done()]:
            del self._waiting[request.id]
            try:
                guide = future.result()
            except GrammarRefused as error:
                yield request, str(error)
                continue
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of the library is not an Exception
                yield request, f"the grammar library failed: {library_message(str(error))}"
                continue
            request.guide = guide
            # These are the output of an earlier attempt on another worker.
            guide.advance(request.tokens[len(request.submit.prompt) :])
            yield request, guide.error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


# Scheduler of the next step: continuous batching with chunked prefill, first come first served.
#
# Decoding requests run first and leave a share of the token budget to prompts, which also use what decoding leaves
# over. With chunked prefill, long prompts leave a share of the prompt budget to short ones (`share_prompt_budget`):
# a waiting short prompt may overtake a long one as long as another long prompt is in progress. The oldest waiting long
# prompt is next once none is in progress, and then nothing overtakes it. Requests of several clients wait in turn
# (`WaitingQueue`).
#
# When blocks run out, the youngest request is preempted: it gives its blocks back and later recomputes its keys from
# its tokens, so no token is lost and the text does not change. The oldest request is never preempted, which guarantees
# progress.

PROMPT_SHARE = 8
"""Decoding leaves 1/PROMPT_SHARE of the token budget of a step to prompts that can run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a batch, named as in vLLM.

    Without ``chunked_prefill`` a prompt runs in one step; a prompt longer than ``max_num_batched_tokens`` then runs in
    a step of its own, the only case that may exceed this bound. With either, no row of a prompt crosses a boundary of
    the ``attention_chunk`` positions that the target's attention looks at, if it has such chunks (0: it has none).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    attention_chunk: int = 0


@dataclass(slots=True)
class Counters:
    """Counters since the start or the last reset, with the names of ``contract.Report``."""

    preemptions: int = 0
    prefill_chunks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    remote_prefills: int = 0
    remote_prefill_failures: int = 0
    remote_prefill_tokens: int = 0
    remote_prefill_bytes: int = 0


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
        self.prefill_limit = PrefillLimit(limits.max_num_batched_tokens, self._prompt_share, timed=timed)
        self._pool = pool
        self.reuse = PrefixReuse(pool, enabled=prefix_caching, salt=salt)
        self._slots = list(range(limits.max_num_seqs))[::-1]
        self._arrivals = self._turns = 0
        self._decoding_took_turns = False

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and not self.running

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

    @property
    def queued_prompt_tokens(self) -> int:
        """Number of prompt tokens that are still to be computed, of waiting and running requests."""
        running = sum(one.prefill_end - one.prefilled for one in self.running)
        return running + sum(one.expected_prefill for one in self.waiting)

    def missing_blocks(self, request: Request) -> tuple[int, int]:
        """Return the numbers of the first block of a request's text that is not cached, and of its last one.

        Both are the same if blocks from elsewhere are of no use: all are cached, the request reuses none, or they do
        not fit beside the running requests.
        """
        hit, end = self.reuse.find(request), blocks_for(len(request.tokens)) - 1
        reuses = self.reuse.enabled and request.submit.sampling.prompt_logprobs is None
        return (len(hit.blocks), end) if reuses and self._fits(request, hit) else (end, end)

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self._arrivals += 1
        request.order = self._arrivals
        self._enqueue(request)

    def next_batch(self, dispatch: Dispatch) -> tuple[list[Row], Choice]:
        """Return the rows of the next batch, and the choice of shapes for those that decode.

        There are no rows if no request can run, e.g. before a step in flight is collected. The choice is empty if no
        request decodes. Admits waiting requests, takes cache blocks and may preempt requests.

        Args:
            dispatch: Selects the draft trees of the decoding requests.
        """
        self.reuse.begin_step()
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
        return rows, selection.choice

    def release(self, request: Request) -> None:
        """Remove a finished or cancelled request, running or waiting, and free its slot and blocks."""
        if request.slot >= 0:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        self.waiting.charge_output(request)

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
        hit = self.reuse.find_next(request)
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
            budget = min(budget, self.prefill_limit.tokens)
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
            hit = self.reuse.find_next(request)
            if not self._fits(request, hit) or self.reuse.is_being_filled(request, hit):
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
        if self.reuse.enabled and request.epoch == 0:
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
        if chunk := self._limits.attention_chunk:
            count = min(count, chunk - start % chunk)
        if count <= 0 or not self._reserve(request, start + count, rows):
            return 0
        request.prefilled += count
        self.reuse.record_chunk(request, start, request.prefilled)
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
        request.expected_prefill = self._to_prefill(request, self.reuse.find(request))
        self.waiting.add(request)

    def _vacate(self, request: Request) -> None:
        """Free the slot and the blocks of a running request."""
        self.running.remove(request)
        self._pool.release(request.blocks)
        self._slots.append(request.slot)
        request.slot, request.blocks = -1, []
