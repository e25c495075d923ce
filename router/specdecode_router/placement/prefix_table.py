"""Cached prefixes that workers are expected to have, estimated from the cached tokens of finished requests."""

from __future__ import annotations

from collections import OrderedDict

from specdecode_router.placement.affinity import Affinity

MAX_CONVERSATIONS = 16_384
"""Conversations that are remembered, about 10 MB. A worker's own cache holds far fewer."""
MAX_WORKERS_PER_CONVERSATION = 4
"""Workers that are remembered for a conversation: the first of its rank, and those that it spilled to."""
RETENTION_STEP = 0.1
"""Weight of a new observation in a worker's retention, so that about ten requests decide."""


class PrefixTable:
    """Expected cached tokens by affinity and worker, in bounded memory.

    After a request, its worker has the prompt and the answer in its cache. How much of that is still there at the next
    turn depends on how fast the worker evicts, which its requests show: ``retention`` of a worker is the moving average
    of cached tokens over those that it could have had cached. Both together are the expectation.
    """

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._tokens: OrderedDict[bytes, dict[str, int]] = OrderedDict()
        self._retention: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def record(
        self, affinity: Affinity, worker: str, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> None:
        """Record a finished request.

        Args:
            affinity: Affinity of the request.
            worker: Name of the worker.
            prompt_tokens: Tokens of the prompt.
            cached_tokens: Tokens of the prompt that the worker had cached.
            completion_tokens: Tokens of the answer.
        """
        key = affinity.key
        workers = self._tokens.pop(key, {})
        possible = min(workers.pop(worker, 0), prompt_tokens)
        if possible > 0:
            observed = min(cached_tokens / possible, 1.0)
            before = self._retention.get(worker, 1.0)
            self._retention[worker] = before + RETENTION_STEP * (observed - before)
        workers[worker] = prompt_tokens + completion_tokens
        if len(workers) > MAX_WORKERS_PER_CONVERSATION:
            del workers[next(iter(workers))]
        self._tokens[key] = workers
        if len(self._tokens) > self._max_conversations:
            self._tokens.popitem(last=False)

    def expected(self, affinity: Affinity) -> dict[str, float]:
        """Return the tokens that each worker is expected to have cached, by name; workers without any are absent."""
        workers = self._tokens.get(affinity.key, {})
        return {name: tokens * self._retention.get(name, 1.0) for name, tokens in workers.items()}

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that is gone. Its conversations drop it as they end, for names of pods are not used again."""
        self._retention.pop(worker, None)
