"""Fit of a draft model's vocabulary to that of its target.

Equal tokenizers may have matrices of different sizes, since published models pad them differently; `fit_vocabulary`
makes them equal. Other tokenizers are matched by the bytes of their tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specdecode_worker.contract import Method
from specdecode_worker.models.configs.model_config import llama_config, read_config
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.vocabulary_map import VocabularyMap
from specdecode_worker.models.vocabulary.vocabulary_match import (
    TOKENIZER_FILE,
    VocabularyMatch,
    expect_same_ordinary_tokens,
    match_vocabularies,
)


def expect_vocabulary(method: Method, folder: Path, target_folder: Path) -> None:
    """Raise VocabularyMismatch if ``folder`` holds a head with the tokenizer of another target.

    Most heads come without a tokenizer. They are checked by the shapes of their matrices alone.
    """
    if method != "draft-model" and (folder / TOKENIZER_FILE).is_file():
        expect_same_ordinary_tokens(target_folder, folder)


def match_draft_model(
    target_folder: Path, target_size: int, draft_folder: Path, max_model_len: int | None
) -> VocabularyMatch | None:
    """Match a draft model's vocabulary with that of a target with ``target_size`` rows. No weights are read.

    Raises:
        ConfigMismatch: The draft's config.json is unsupported.
        VocabularyMismatch: The draft cannot draft for this target.
    """
    draft_size = llama_config(read_config(draft_folder), max_model_len).vocab_size
    return match_vocabularies(target_folder, draft_folder, target_size, draft_size)


def set_vocabulary(draft: Llama, match: VocabularyMatch | None, target_size: int) -> None:
    """Let a draft model read and propose ids of a target with ``target_size`` rows, in place."""
    if match is None:
        fit_vocabulary(draft, target_size)
    else:
        draft.vocabulary = VocabularyMap(match, draft.model.embed_tokens.weight.device)


@torch.no_grad()
def fit_vocabulary(draft: Llama, size: int) -> None:
    """Resize the draft's embedding and lm_head to ``size`` rows, in place.

    Padding rows at the end are cut, or added as zeros. Target and draft can then exchange any token id; the added ids
    belong to no token.
    """
    if draft.config.vocab_size == size:
        return
    embedding, output = draft.model.embed_tokens, draft.lm_head
    tied = output.weight is embedding.weight
    embedding.weight = _resized(embedding.weight, size)
    output.weight = embedding.weight if tied else _resized(output.weight, size)
    embedding.num_embeddings = output.out_features = size
    draft.config = replace(draft.config, vocab_size=size)


def _resized(weight: Tensor, size: int) -> nn.Parameter:
    resized = weight.new_zeros(size, weight.shape[1])
    common_rows = min(size, len(weight))
    resized[:common_rows] = weight[:common_rows]
    return nn.Parameter(resized, requires_grad=False)
