"""From a draft's config to a draft that can run: weights, cache, calibration. At start, and again for a swap."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specdecode_worker.contract import DraftConfig, DraftState
from specdecode_worker.engine.cache import PagedCache
from specdecode_worker.engine.drafts.drafter import Drafter
from specdecode_worker.engine.drafts.eagle import EagleDrafter
from specdecode_worker.engine.drafts.model import ModelDrafter
from specdecode_worker.engine.drafts.ngram import NgramDrafter
from specdecode_worker.engine.drafts.roster import FIRST, LoadedDraft
from specdecode_worker.engine.state import DeviceState
from specdecode_worker.models.config import Eagle3Config, LlamaConfig
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fusing import fuse
from specdecode_worker.models.llama import Llama
from specdecode_worker.models.weights import load_eagle3, load_llama, weights_hash

log = logging.getLogger(__name__)

Resolve = Callable[[str], Path]
"""Model URI -> folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoader:
    """Loads drafts for one target, into caches of as many blocks as the target's. Touches nothing that runs."""

    target: Llama
    state: DeviceState
    blocks: int
    resolve: Resolve
    foresees: bool
    """Nothing is launched ahead: see NgramDrafter."""

    def __call__(self, config: DraftConfig, name: str = FIRST) -> LoadedDraft:
        """Raises ModelError for a draft that does not fit its target."""
        if config.method == "ngram":
            return self._ngram(config, name)
        assert config.uri is not None, "the contract asks for a uri"
        folder = self.resolve(config.uri)
        state = DraftState(name=name, method=config.method, hash=weights_hash(folder), uri=config.uri)
        return LoadedDraft(self._drafter(config, folder), state)

    def _drafter(self, config: DraftConfig, folder: Path) -> Drafter:
        sharpness = read_sharpness(folder)
        match config.method:
            case "eagle3":
                head = load_eagle3(folder, self.target, dtype=self._dtype, device=self._device)
                fuse(head)
                same = head.config.draft_vocab_size == self.target.config.vocab_size
                ids = None if same else head.target_ids
                return EagleDrafter(head, ids, self._cache(head.config, 1), self.state, self._positions, sharpness)
            case "draft-model":
                model = load_llama(folder, dtype=self._dtype, device=self._device)
                fuse(model)
                cache = self._cache(model.config, model.config.num_hidden_layers)
                return ModelDrafter(model, self.target.config.vocab_size, cache, self.state, sharpness)
            case _:
                raise ModelError(f"this version has no drafter for method {config.method}")

    def _ngram(self, config: DraftConfig, name: str) -> LoadedDraft:
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        drafter = NgramDrafter(self.state, self.target.config.vocab_size, shortest, longest, foresees=self.foresees)
        return LoadedDraft(drafter, DraftState(name=name, method="ngram", hash=f"ngram-{shortest}-{longest}"))

    def _cache(self, config: LlamaConfig | Eagle3Config, layers: int) -> PagedCache:
        return paged_cache(config, layers, self.blocks, self._dtype, self._device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.target.model.embed_tokens.weight.dtype

    @property
    def _device(self) -> torch.device:
        return self.target.model.embed_tokens.weight.device

    @property
    def _positions(self) -> int:
        return self.target.config.max_position_embeddings


def paged_cache(
    config: LlamaConfig | Eagle3Config, layers: int, blocks: int, dtype: torch.dtype, device: torch.device
) -> PagedCache:
    return PagedCache(
        layers=layers,
        blocks=blocks,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def read_sharpness(folder: Path) -> tuple[float, ...]:
    """Factors on the draft's logits by depth, from ``calibration.json`` beside the weights; absent means none."""
    path = folder / "calibration.json"
    if not path.exists():
        return ()
    try:
        return tuple(float(factor) for factor in json.loads(path.read_text())["sharpness"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f'{path} should hold {{"sharpness": [factor of depth 1, ...]}}: {error}') from None
