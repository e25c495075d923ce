"""Memory check of a draft that is loaded while the engine runs, based on the headers of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.drafts.loaded_draft import DEFAULT_DRAFT, LoadedDraft
from specdecode_worker.engine.drafts.own_device.placed_loader import PlacedDraftLoader
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.memory.memory_budget import DRAFT_PROCESS_BYTES
from specdecode_worker.engine.memory.model_inventory import expect_own_logits, network_of
from specdecode_worker.models.checkpoints.draft_weights import WeightMethod, build_meta_draft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.optimize import should_pack

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class CheckedDraftLoader:
    """``LoadDraft`` for a running worker: checks that the draft fits into free memory before it is loaded."""

    loader: PlacedDraftLoader
    ranks: int
    """Number of devices that share the target."""
    free_bytes: Callable[[], int]
    """Function that measures the free memory in bytes, called for every draft."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load a draft.

        Raises:
            ModelError: The draft does not fit the target, or not into memory together with the running draft.
        """
        method = config.method
        if method == "ngram" or method == "suffix" or method == "none" or config.uri is None:
            return self.loader(config, name)
        if self.loader.leaves_memory_of_target(config):
            return self.loader(config, name)
        expect_own_logits(config, self.ranks)
        process = DRAFT_PROCESS_BYTES if config.placement == "own" else 0
        needed, free = self._needed_bytes(method, config.uri) + process, self.free_bytes()
        if needed > free:
            raise ModelError(
                f"{config.uri} needs {needed / _GIB:.2f} GiB beside the draft that runs until it is ready, and "
                f"{free / _GIB:.2f} GiB are free; give the worker more memory, or change the draft in the spec, "
                "which restarts workers one by one"
            )
        return self.loader(config, name)

    def _needed_bytes(self, method: WeightMethod, uri: str) -> int:
        """Return the peak bytes of loading: weights, twice while they are packed, tables, and the draft's cache.

        The draft's cache has as many blocks as the target's.
        """
        loader = self.loader.local
        weight = loader.target.model.embed_tokens.weight
        draft = build_meta_draft(
            method,
            loader.resolve(uri),
            loader.target,
            target_folder=loader.target_folder,
            max_model_len=loader.max_model_len,
        )
        network = network_of("draft", draft, weight.dtype, weight.device)
        copies = 2 if should_pack(weight.dtype, weight.device) else 1
        cache = loader.blocks * BLOCK_SIZE * network.kv_bytes_per_token(weight.dtype.itemsize)
        return copies * network.weights + network.tables + cache
