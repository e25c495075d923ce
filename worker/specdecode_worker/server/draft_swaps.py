"""Draft swaps that a client of the admin port asks for: the checks before the engine begins to load the draft."""

from __future__ import annotations

import asyncio
from pathlib import Path

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.drafts.draft_hash import draft_hash
from specdecode_worker.engine.drafts.draft_problem import describe_failure
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.models.checkpoints import model_store
from specdecode_worker.server.errors import Conflict


class DraftSwapper:
    """Starts draft swaps in the order of their requests."""

    def __init__(self, engine: EngineClient, cache_dir: Path) -> None:
        self._engine, self._cache_dir = engine, cache_dir
        self._lock = asyncio.Lock()

    async def begin(self, draft: DraftConfig, name: str, expected_hash: str | None) -> str:
        """Start to replace the draft ``name`` and return the hash that the report shows once ``draft`` runs.

        Raises:
            Conflict: The files cannot be read, or do not have the expected hash.
            CallRefused: The engine cannot try the swap.
            EngineGone: The engine has ended.
        """
        async with self._lock:
            actual_hash = await asyncio.to_thread(self._hash, draft)
            if expected_hash not in (None, actual_hash):
                raise Conflict(
                    f"the files of {draft.uri or draft.method} have the hash {actual_hash}, not {expected_hash}; check "
                    "the uri, or send the hash that you mean",
                    param="expected_hash",
                )
            await self._engine.begin_draft_swap(draft, name, actual_hash)
        return actual_hash

    def _hash(self, draft: DraftConfig) -> str:
        try:
            return draft_hash(draft, lambda uri: model_store.resolve(uri, self._cache_dir))
        except Exception as error:
            raise Conflict(describe_failure(error, draft.uri or draft.method)) from None
