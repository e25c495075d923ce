"""Prefix reuse: lookup of cached blocks for a new request and publication of its own full blocks.

A block is published once the step that fills it has been launched, which is safe because the device runs steps in order
and readers are launched later. A published block is never written again. The block with the last prompt token is never
reused, because the logits of that token are needed.

The salt of a request is part of the digest of its first block, and so of every block. Keys of drafts and hidden states
of the target are found through the same blocks, so requests with different salts share none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE, BlockPool, blocks_for
from specdecode_worker.engine.kv_cache.prefix_index import extend_digests, root_digest, salted_root
from specdecode_worker.engine.request import CachedPrefix, Request

_STATES = "states"
"""Mark of blocks with stored hidden states of their last token. It cannot collide with a draft's mark, a hash."""
_FOLLOWED = "followed"
"""Mark of blocks that any draft has processed, even one that was replaced since."""


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
    tokens: int
    draft: str
    draft_prefill: bool
    watched: frozenset[bytes]
    version: int


class PrefixReuse:
    """Prefix reuse of one scheduler. If disabled, no block is found or published."""

    def __init__(self, pool: BlockPool, *, enabled: bool, salt: str) -> None:
        """Work on the blocks of ``pool``. ``salt`` identifies the target that computes the keys."""
        self.enabled = enabled
        self._pool, self._index = pool, pool.prefixes
        self.draft_prefill = False
        """True if drafts process prompts.

        If they do, prefixes that were cached while no draft ran are computed once more; otherwise the draft could never
        see these prefixes.
        """
        self._root = root_digest(salt)
        self._filling: set[bytes] = set()
        self._unseen = 0
        self._known: dict[Request, _KnownHit] = {}
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
        draft, prefill = request.draft.draft, self.draft_prefill
        self._known[request] = _KnownHit(hit, len(request.tokens), draft, prefill, watched, version)
        if len(self._known) > 2:
            del self._known[next(iter(self._known))]
        return hit

    def _is_current(self, request: Request, known: _KnownHit) -> bool:
        """Return whether a search would return the same hit once more."""
        before = known.tokens, known.draft, known.draft_prefill
        if before != (len(request.tokens), request.draft.draft, self.draft_prefill):
            return False
        changes = self._index.changes_since(known.version)
        if changes is None or not known.watched.isdisjoint(changes):
            return False
        known.version = self._index.version
        return True

    def find(self, request: Request) -> CachedPrefix:
        """Return the cached prefix of a request, which ends before the block with the last token to prefill."""
        most = self._max_reusable_blocks(request)
        blocks = self._index.find(self._digests(request, most)[:most])
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
            self._filling.update(self._digests(request, whole)[start // BLOCK_SIZE : whole])

    def publish(self, request: Request, end: int) -> None:
        """Register the full blocks of the first ``end`` tokens and mark those with valid keys of the draft."""
        if not self.enabled:
            return
        whole = end // BLOCK_SIZE
        if whole > request.published:
            digests = self._digests(request, whole)
            for k in range(request.published, whole):
                self._replace_useless(digests[k], request.draft.draft)
                self._pool.register(request.blocks[k], digests[k], digests[k - 1] if k else request.digest_root)
                self._index.mark(request.blocks[k], _STATES)
            request.published = whole
        while request.marked < request.published and request.drafted >= (request.marked + 1) * BLOCK_SIZE:
            first = max(request.marked * BLOCK_SIZE, 1)  # ``start`` is at least 1: EAGLE drafts have no slot 0.
            if request.draft.draft and request.draft.start <= first:
                self._index.mark(request.blocks[request.marked], request.draft.draft)
                self._index.mark(request.blocks[request.marked], _FOLLOWED)
            request.marked += 1

    def forget(self, identity: str, *, states: bool) -> None:
        """Invalidate the cached keys of a draft and, with ``states``, the stored hidden states of the target."""
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

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """Return at least the first ``count`` block digests of the request, computing missing ones."""
        if not request.digest_root:
            request.digest_root = salted_root(self._root, request.submit.cache_salt)
        extend_digests(request.digests, request.tokens, count, request.digest_root, BLOCK_SIZE)
        return request.digests
