"""Loader of drafts: weights, KV cache and calibration of a DraftConfig, at start and for a draft swap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specdecode_worker.contract import MAX_NODES, DraftConfig, DraftState
from specdecode_worker.engine.drafts.calibration_file import read_calibration
from specdecode_worker.engine.drafts.draft_hash import draft_hash
from specdecode_worker.engine.drafts.draft_model import ModelDrafter
from specdecode_worker.engine.drafts.drafter import Drafter
from specdecode_worker.engine.drafts.eagle import EagleDrafter
from specdecode_worker.engine.drafts.loaded_draft import DEFAULT_DRAFT, LoadedDraft
from specdecode_worker.engine.drafts.lookup.ngram import NgramDrafter
from specdecode_worker.engine.drafts.lookup.suffix import SuffixDrafter
from specdecode_worker.engine.drafts.medusa import MedusaDrafter
from specdecode_worker.engine.drafts.parallel.dflash import DFlashDrafter
from specdecode_worker.engine.drafts.parallel.peagle import PEagleDrafter
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.models.checkpoints.draft_weights import Draft, load_draft
from specdecode_worker.models.configs.dflash_config import DFlashConfig
from specdecode_worker.models.configs.draft_config import Eagle3Config, EagleConfig
from specdecode_worker.models.configs.target_config import LlamaConfig
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.medusa import MedusaHeads
from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.models.optimize import fuse, quantise_draft
from specdecode_worker.speculation.suffix_store import SuffixStore

log = logging.getLogger(__name__)

Resolve = Callable[[str], Path]
"""Callable that returns the local folder of a model URI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoader:
    """Loader of drafts for one target.

    Their caches have as many blocks as the target's. Loading does not affect drafts that are in use.
    """

    target: Llama
    target_folder: Path
    max_model_len: int
    state: DeviceState
    blocks: int
    resolve: Resolve
    host_is_current: bool
    """True if no step is launched before the previous one is collected; see NgramDrafter and SuffixDrafter."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load the draft of ``config``. Raise ModelError if it cannot be loaded or does not fit the target."""
        if config.method == "ngram":
            return self._ngram(config, name)
        if config.method == "suffix":
            return self._suffix(config, name)
        assert config.method != "none", "nothing is loaded for it"
        assert config.uri is not None, "the contract asks for it"
        folder = self.resolve(config.uri)
        draft = load_draft(
            config.method,
            folder,
            self.target,
            target_folder=self.target_folder,
            dtype=self._dtype,
            device=self._device,
            max_model_len=self.max_model_len,
        )
        if isinstance(draft, Llama) and (vocabulary := draft.vocabulary) is not None:
            log.info(
                "draft %s has another tokenizer: it proposes %d tokens, which cover %.0f %% of a sample text",
                config.uri,
                len(vocabulary.target_ids),
                100 * vocabulary.coverage,
            )
        quantise_draft(draft, config.quantization)
        fuse(draft)
        calibration = read_calibration(folder)
        state = DraftState(
            name=name,
            method=config.method,
            hash=draft_hash(config, lambda _: folder),  # of the files that were read, whatever is there by now
            uri=config.uri,
            quantization=config.quantization,
            agreement=calibration.agreement[:MAX_NODES],
        )
        return LoadedDraft(self._drafter(draft, calibration.sharpness), state)

    def _drafter(self, draft: Draft, sharpness: tuple[float, ...]) -> Drafter:
        match draft:
            case DFlashHead():
                return DFlashDrafter(draft, self._cache(draft.config), self.state, self._positions, sharpness)
            case PEagleHead():
                ids = draft.target_ids if self._has_own_vocabulary(draft) else None
                return PEagleDrafter(draft, ids, self._cache(draft.config), self.state, self._positions, sharpness)
            case Eagle3Head() | EagleHead():
                ids = draft.target_ids if self._has_own_vocabulary(draft) else None
                cache = self._cache(draft.config)
                return EagleDrafter(draft, ids, cache, self.state, self._positions, sharpness)
            case MedusaHeads():
                return MedusaDrafter(draft, draft.target_ids, self.state, sharpness)
            case Llama():
                cache = self._cache(draft.config)
                return ModelDrafter(draft, self.target.config.vocab_size, cache, self.state, sharpness)

    def _has_own_vocabulary(self, head: Eagle3Head | EagleHead) -> bool:
        return isinstance(head, Eagle3Head) and head.config.draft_vocab_size != self.target.config.vocab_size

    def _ngram(self, config: DraftConfig, name: str) -> LoadedDraft:
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        drafter = NgramDrafter(
            self.state, self.target.config.vocab_size, shortest, longest, host_is_current=self.host_is_current
        )
        return LoadedDraft(drafter, DraftState(name=name, method="ngram", hash=draft_hash(config, self.resolve)))

    def _suffix(self, config: DraftConfig, name: str) -> LoadedDraft:
        drafter = SuffixDrafter(self.state, SuffixStore(), host_is_current=self.host_is_current)
        return LoadedDraft(drafter, DraftState(name=name, method="suffix", hash=draft_hash(config, self.resolve)))

    def _cache(self, config: CachedConfig) -> PagedCache:
        return paged_cache(config, config.num_hidden_layers, self.blocks, self._dtype, self._device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.target.model.embed_tokens.weight.dtype

    @property
    def _device(self) -> torch.device:
        return self.target.model.embed_tokens.weight.device

    @property
    def _positions(self) -> int:
        return self.target.config.max_position_embeddings


CachedConfig = LlamaConfig | Eagle3Config | EagleConfig | DFlashConfig
"""Configuration of a network that has a KV cache."""


def paged_cache(config: CachedConfig, layers: int, blocks: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
    """Create a paged KV cache of ``blocks`` blocks for ``layers`` layers of a network."""
    return PagedCache(
        layers=layers,
        blocks=blocks,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
