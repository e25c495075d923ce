"""Tests of the comparison of two tokenizers, and of draft models that are resized to their target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import expect_vocabulary, fit_vocabulary
from specdecode_worker.models.errors import VocabularyMismatch
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise
from support.worker.tokens import saved, tokenizer

TOKENS = torch.randint(0, 90, (11,), generator=torch.Generator().manual_seed(4))


def sentencepiece(words: Sequence[str], special: Sequence[str] = ("<unk>", "</s>")) -> Tokenizer:
    """Return a tokenizer that writes spaces as ``▁`` and has all bytes, then ``words``, as ids after ``special``."""
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "▁")
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model.add_special_tokens([AddedToken(token, special=True) for token in special])
    return model


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "eagle", "medusa", "draft-model"])
def test_a_draft_with_the_tokenizer_of_another_target_is_refused(method: Any, tmp_path: Path) -> None:
    target, head = saved(tmp_path / "a", tokenizer()), saved(tmp_path / "b", tokenizer(special=("<eos>", "<more>")))
    expect_vocabulary(method, head, target)
    saved(head, sentencepiece(["A"]))
    with pytest.raises(
        VocabularyMismatch,
        match="token 2 is '<0x00>' to the draft and '#' to the target; take a draft with the target's tokenizer",
    ):
        expect_vocabulary(method, head, target)


def test_only_a_head_may_come_without_a_tokenizer(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    expect_vocabulary("eagle3", tmp_path, target)
    with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json does not exist"):
        expect_vocabulary("draft-model", tmp_path, target)


def test_rules_padding_and_truncation_of_a_tokenizer_may_differ(tmp_path: Path) -> None:
    """The draft reads the target's tokens, however its own tokenizer would have split the text."""
    cut = tokenizer(lowercase=True)
    cut.enable_truncation(3)
    expect_vocabulary("draft-model", saved(tmp_path / "b", cut), saved(tmp_path / "a", tokenizer()))


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    for junk in ("", "{}", "[1, 2", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(junk)
        with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json cannot be read"):
            expect_vocabulary("draft-model", tmp_path, target)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [90, 97, 120])
def test_fitting_preserves_the_logits_of_common_tokens(size: int, tied: bool, shape: dict[str, Any]) -> None:
    draft = CausalLM(causal_lm_config(shape | {"tie_word_embeddings": tied})).requires_grad_(False)
    randomise(draft, 5)

    def logits() -> torch.Tensor:
        return draft.logits(draft(TOKENS, torch.arange(11), dense).hidden_TE)

    before = logits()
    fit_vocabulary(draft, size)
    after = logits()
    both = min(size, 97)
    assert after.shape == (11, size)
    torch.testing.assert_close(after[:, :both], before[:, :both])
    assert after[:, 97:].eq(0).all()
    assert draft.config.vocab_size == size
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    assert draft(torch.tensor([size - 1]), torch.tensor([0]), dense).hidden_TE.isfinite().all()
