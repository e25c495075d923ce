"""Prefix reuse: which blocks an arriving request finds, and which it leaves for others.

A block becomes known once the step that fills it is launched: what reads it is launched later, and the device runs in
order. A known block is never written to again. So the last prompt token, whose logits are needed, is never reused.
"""

from __future__ import annotations

from itertools import takewhile

from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE, BlockPool, blocks_for
from specdecode_worker.engine.kv_cache.prefix_index import extend_digests, root_digest
from specdecode_worker.engine.request import Hit, Request

_STATES = "states"
"""Mark of blocks whose last token's states are kept; no draft's identity, which is a hash."""
_FOLLOWED = "followed"
"""Mark of blocks that some draft has followed, be it gone since."""


class Reuse:
    """One per scheduler. ``salt`` names the target whose keys are cached; disabled, nothing is found or kept."""

    def __init__(self, pool: BlockPool, *, enabled: bool, salt: str) -> None:
        self.enabled = enabled
        self._pool, self._index = pool, pool.prefixes
        self.drafting = False
        """Whether drafts follow prompts. Then what was computed while none did is computed again, once, rather than
        hide a beginning from the draft for ever."""
        self._root = root_digest(salt)
        self._filling: set[bytes] = set()

    def begin_step(self) -> None:
        self._filling.clear()

    def find(self, request: Request) -> Hit:
        """The blocks that a request begins with, but for the last token of what it is to prefill."""
        most = self._most(request)
        found = self._index.find(self._digests(request, most)[:most])
        if self.drafting and request.draft.draft:
            found = list(takewhile(lambda block: self._index.is_marked(block, _FOLLOWED), found))
        marked = [self._index.is_marked(block, request.draft.draft) for block in found]
        if marked[-2:] == [True, False]:
            # Its first owner ended before the draft had caught up with the last block. One block of prefill more is
            # cheap beside a draft that cannot see anything of the prefix.
            found, marked = found[:-1], marked[:-1]
        drafted = next((i for i, is_marked in enumerate(reversed(marked)) if not is_marked), len(marked))
        return Hit(found, drafted, not found or self._index.is_marked(found[-1], _STATES))

    def is_coming(self, request: Request, hit: Hit) -> bool:
        """Whether the step being made fills the very block that ``request`` needs next: it is found a step later."""
        after = len(hit.blocks)
        return after < self._most(request) and request.digests[after] in self._filling

    def fills(self, request: Request, start: int, end: int) -> None:
        """A chunk of this step."""
        if self.enabled:
            whole = end // BLOCK_SIZE
            self._filling.update(self._digests(request, whole)[start // BLOCK_SIZE : whole])

    def publish(self, request: Request, end: int) -> None:
        """Makes the blocks known that hold nothing but the first ``end`` tokens, and marks what its draft has seen."""
        if not self.enabled:
            return
        whole = end // BLOCK_SIZE
        digests = self._digests(request, whole)
        for k in range(request.published, whole):
            self._replace_useless(digests[k], request.draft.draft)
            self._pool.register(request.blocks[k], digests[k], digests[k - 1] if k else self._root)
            self._index.mark(request.blocks[k], _STATES)
        request.published = max(request.published, whole)
        while request.marked < request.published and request.drafted >= (request.marked + 1) * BLOCK_SIZE:
            first = max(request.marked * BLOCK_SIZE, 1)  # the draft has no slot 0
            if request.draft.draft and request.draft.start <= first:
                self._index.mark(request.blocks[request.marked], request.draft.draft)
                self._index.mark(request.blocks[request.marked], _FOLLOWED)
            request.marked += 1

    def forget(self, identity: str, *, states: bool) -> None:
        self._index.forget_marks(identity)
        if states:
            self._index.forget_marks(_STATES)

    def _replace_useless(self, digest: bytes, draft: str) -> None:
        """A resting block without the draft's keys makes way for the same text with them."""
        known = self._index.holder(digest)
        if known is not None and draft and self._index.rests(known) and not self._index.is_marked(known, draft):
            self._pool.let_go(known)

    def _most(self, request: Request) -> int:
        if not self.enabled or request.submit.sampling.prompt_logprobs is not None:
            return 0
        return blocks_for(len(request.tokens)) - 1

    def _digests(self, request: Request, count: int) -> list[bytes]:
        extend_digests(request.digests, request.tokens, count, self._root, BLOCK_SIZE)
        return request.digests
