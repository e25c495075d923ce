"""Tests that a draft model is refused if its tokenizer differs from the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokens import saved, tokenizer

from specdecode_worker.models.checkpoints.vocabulary_check import PROBE, check_vocabulary, fit_vocabulary
from specdecode_worker.models.configs.model_config import llama_config
from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.networks.llama import Llama

TOKENS = torch.randint(0, 90, (11,), generator=torch.Generator().manual_seed(4))


def test_the_same_tokenizer_passes(tmp_path: Path) -> None:
    check_vocabulary(saved(tmp_path / "a", tokenizer()), saved(tmp_path / "b", tokenizer()))


def test_a_token_with_another_id_is_named(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer(special=("<eos>", "<user>")))
    draft = saved(tmp_path / "b", tokenizer(special=("<eos>", "<bot>")))
    with pytest.raises(VocabularyMismatch, match="token 261 is '<bot>' to the draft and '<user>' to the target"):
        check_vocabulary(target, draft)


def test_a_token_that_one_lacks_is_named(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer(special=("<eos>", "<think>")))
    draft = saved(tmp_path / "b", tokenizer())
    with pytest.raises(VocabularyMismatch, match="token 261 is nothing to the draft and '<think>' to the target"):
        check_vocabulary(target, draft)
    with pytest.raises(VocabularyMismatch, match="token 261 is '<think>' to the draft and nothing to the target"):
        check_vocabulary(draft, target)


def test_different_tokenizer_rules_are_detected_by_the_probe_text(tmp_path: Path) -> None:
    """Tokenizers with equal vocabularies but different normalizers or merges are refused."""
    target = saved(tmp_path / "a", tokenizer())
    lowered = saved(tmp_path / "b", tokenizer(lowercase=True))
    with pytest.raises(VocabularyMismatch, match="token 0 of the probe text is 'the' to the draft and 'T' to"):
        check_vocabulary(target, lowered)
    fewer = saved(tmp_path / "c", tokenizer(merges=[("t", "h"), ("i", "n")]))
    place = tokenizer().encode(PROBE).tokens.index("Ġthe")
    with pytest.raises(VocabularyMismatch, match=f"token {place} of the probe text is 'Ġ' to the draft and 'Ġthe'"):
        check_vocabulary(target, fewer)


def test_padding_and_truncation_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    cut = tokenizer()
    cut.enable_truncation(3)
    check_vocabulary(saved(tmp_path / "a", tokenizer()), saved(tmp_path / "b", cut))


def test_missing_or_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json does not exist"):
        check_vocabulary(target, tmp_path)
    for junk in ("", "{}", "[1, 2", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(junk)
        with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json cannot be read"):
            check_vocabulary(target, tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [90, 97, 120])
def test_fitting_preserves_the_logits_of_common_tokens(
    size: int, tied: bool, shape: dict[str, Any], randomise: Any, dense: Any
) -> None:
    draft = Llama(llama_config(shape | {"tie_word_embeddings": tied})).requires_grad_(False)
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
