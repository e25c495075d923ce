"""Tests of the match of two vocabularies, and of draft models that are resized or mapped to their target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokens import saved, tokenizer

from specdecode_worker.models.checkpoints.draft_vocabulary import fit_vocabulary, set_vocabulary
from specdecode_worker.models.configs.model_config import llama_config
from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.vocabulary.vocabulary_match import PROBE, VocabularyMatch, match_vocabularies

TOKENS = torch.randint(0, 90, (11,), generator=torch.Generator().manual_seed(4))


def match(
    tmp_path: Path, target: Tokenizer, draft: Tokenizer, *, rows: int = 300, draft_rows: int = 300
) -> VocabularyMatch | None:
    """Match two tokenizers whose models have this many rows."""
    return match_vocabularies(saved(tmp_path / "a", target), saved(tmp_path / "b", draft), rows, draft_rows)


def test_equal_tokenizers_need_no_map(tmp_path: Path) -> None:
    assert match(tmp_path, tokenizer(), tokenizer()) is None


def test_added_tokens_may_differ(tmp_path: Path) -> None:
    """Tokens of the same text are paired, whatever their ids; the others are neither fed nor proposed."""
    target = tokenizer(special=("<eos>", "<user>", "<think>"))
    draft = tokenizer(special=("<unk>", "<eos>", "<bot>", "<user>"))
    tables = match(tmp_path, target, draft)
    assert tables is not None
    eos, user, think = (target.token_to_id(name) for name in ("<eos>", "<user>", "<think>"))
    assert tables.draft_ids[:260] == tuple(range(260)), "ordinary tokens have the same ids"
    assert [tables.draft_ids[i] for i in (eos, user)] == [draft.token_to_id("<eos>"), draft.token_to_id("<user>")]
    assert {tables.draft_ids[i] for i in (think, 299)} == {draft.token_to_id("<unk>")}, "unknown ids get the substitute"
    assert set(tables.proposals.values()) == {*range(260), eos, user}
    assert len(set(tables.proposals.values())) == len(tables.proposals)
    assert all(tables.draft_ids[ours] == theirs for theirs, ours in tables.proposals.items())


@pytest.mark.parametrize(
    ("special", "wanted"),
    [
        (("<eos>", "<pad>", "<unk>"), "<unk>"),
        (("<eos>", "[PAD]"), "[PAD]"),
        (("<s>", "<|end|>"), "<s>"),
        ((), "!"),
    ],
    ids=["unknown", "padding", "first special", "none"],
)
def test_the_substitute_is_a_token_of_the_draft(tmp_path: Path, special: tuple[str, ...], wanted: str) -> None:
    draft = tokenizer(special=special)
    tables = match(tmp_path, tokenizer(special=("<none of them>",)), draft)
    assert tables is not None
    assert tables.draft_ids[260] == draft.token_to_id(wanted)


def test_a_special_token_is_not_the_text_that_it_is_written_as(tmp_path: Path) -> None:
    plain, marker = tokenizer(extra=("<user>",), special=()), tokenizer(special=("<eos>", "<user>"))
    tables = match(tmp_path, plain, marker)
    assert tables is not None
    assert set(tables.proposals) == set(range(260))
    assert tables.draft_ids[260] == 260, "the substitute"


def test_added_tokens_match_whether_they_are_special_or_not(tmp_path: Path) -> None:
    plain, marker = tokenizer(), tokenizer(special=("<user>", "<eos>"))
    plain.add_tokens([AddedToken("<user>", special=False)])
    tables = match(tmp_path, plain, marker)
    assert tables is not None
    assert tables.proposals[260] == 261


def test_ids_without_a_row_are_not_used(tmp_path: Path) -> None:
    names = tuple(f"<{i}>" for i in range(8))
    tables = match(tmp_path, tokenizer(special=names), tokenizer(special=names[::-1]), rows=266, draft_rows=264)
    assert tables is not None
    assert len(tables.draft_ids) == 266
    assert max(tables.draft_ids) < 264
    assert {draft: target for draft, target in tables.proposals.items() if draft >= 260} == {262: 265, 263: 264}


def test_another_ordinary_token_is_named(tmp_path: Path) -> None:
    draft = tokenizer(extra=("zz",))
    with pytest.raises(VocabularyMismatch, match="token 260 is 'zz' to the draft and nothing to the target"):
        match(tmp_path, tokenizer(special=()), draft)


def test_different_tokenizer_rules_are_detected_by_the_probe_text(tmp_path: Path) -> None:
    """Tokenizers with equal vocabularies but different normalizers or merges are refused."""
    with pytest.raises(VocabularyMismatch, match="token 0 of the probe text is 'the' to the draft and 'T' to"):
        match(tmp_path, tokenizer(), tokenizer(lowercase=True))
    fewer = tokenizer(merges=[("t", "h"), ("i", "n")])
    place = tokenizer().encode(PROBE).tokens.index("Ġthe")
    with pytest.raises(VocabularyMismatch, match=f"token {place} of the probe text is 'Ġ' to the draft and 'Ġthe'"):
        match(tmp_path, tokenizer(), fewer)


def test_padding_and_truncation_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    cut = tokenizer()
    cut.enable_truncation(3)
    assert match(tmp_path, tokenizer(), cut) is None


def test_missing_or_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json does not exist"):
        match_vocabularies(target, tmp_path, 300, 300)
    for junk in ("", "{}", "[1, 2", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(junk)
        with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json cannot be read"):
            match_vocabularies(target, tmp_path, 300, 300)


@torch.inference_mode()
def test_a_mapped_model_computes_the_logits_of_its_own_ids(shape: dict[str, Any], randomise: Any, dense: Any) -> None:
    draft = Llama(llama_config(shape)).requires_grad_(False)
    randomise(draft, 5)
    before = draft.logits(draft(TOKENS, torch.arange(11), dense).hidden_TE)
    set_vocabulary(draft, VocabularyMatch((96, 3, 3, 0), {3: 1, 96: 0}), 4)
    assert draft.vocabulary is not None
    assert draft.config.vocab_size == 97, "its matrices stay as they are"
    assert draft.vocabulary.inputs(torch.tensor([3, 2, 1, 0])).tolist() == [0, 3, 3, 96]
    assert torch.equal(draft.vocabulary.outputs(before), before[:, [3, 96]])
    assert draft.vocabulary.target_ids.tolist() == [1, 0]
    assert not any("vocabulary" in name for name in draft.state_dict()), "checkpoints do not hold it"


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
