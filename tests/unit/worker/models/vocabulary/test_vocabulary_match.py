"""Tests of the match of two vocabularies, and of draft models that are resized or mapped to their target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import expect_vocabulary, fit_vocabulary, set_vocabulary
from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.vocabulary import (
    MIN_COVERAGE,
    SAMPLE,
    VocabularyMatch,
    match_vocabularies,
)
from support.worker.tokens import saved, tokenizer

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
    assert tables.draft_ids[260] == draft.token_to_id(wanted)


def test_a_special_token_is_not_the_text_that_it_is_written_as(tmp_path: Path) -> None:
    plain, marker = tokenizer(extra=("<user>",), special=()), tokenizer(special=("<eos>", "<user>"))
    tables = match(tmp_path, plain, marker)
    assert set(tables.proposals) == set(range(260))
    assert tables.draft_ids[260] == 260, "the substitute"


def test_added_tokens_match_whether_they_are_special_or_not(tmp_path: Path) -> None:
    plain, marker = tokenizer(), tokenizer(special=("<user>", "<eos>"))
    plain.add_tokens([AddedToken("<user>", special=False)])
    tables = match(tmp_path, plain, marker)
    assert tables.proposals[260] == 261


def test_ids_without_a_row_are_not_used(tmp_path: Path) -> None:
    names = tuple(f"<{i}>" for i in range(8))
    tables = match(tmp_path, tokenizer(special=names), tokenizer(special=names[::-1]), rows=266, draft_rows=264)
    assert len(tables.draft_ids) == 266
    assert max(tables.draft_ids) < 264
    assert {draft: target for draft, target in tables.proposals.items() if draft >= 260} == {262: 265, 263: 264}


def sentencepiece(words: Sequence[str], special: Sequence[str] = ("<unk>", "</s>")) -> Tokenizer:
    """Return a tokenizer that writes spaces as ``▁`` and has all bytes, then ``words``, as ids after ``special``."""
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "▁")
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    model.add_special_tokens([AddedToken(token, special=True) for token in special])
    return model


def test_tokens_of_another_kind_of_tokenizer_match_by_their_bytes(tmp_path: Path) -> None:
    """``▁the`` is ``Ġthe``, and a byte such as ``<0x0A>`` is the byte-level token of a line break."""
    target, draft = tokenizer(), sentencepiece(["▁the", "▁", "in", "A", "zebra"])
    tables = match(tmp_path, target, draft)
    theirs = {"Ġthe": "▁the", "Ġ": "▁", "in": "in", "A": "A", "Ċ": "<0x0A>", "z": "<0x7A>", "Ã": "<0xC3>"}
    for ours, wanted in theirs.items():
        assert draft.id_to_token(tables.draft_ids[target.token_to_id(ours)]) == wanted
        assert tables.proposals[draft.token_to_id(wanted)] == target.token_to_id(ours)
    assert draft.token_to_id("<0x41>") not in tables.proposals, "A is proposed by the token of that text"
    assert draft.token_to_id("zebra") not in tables.proposals
    assert {draft.id_to_token(tables.draft_ids[target.token_to_id(name)]) for name in ("th", "the", "<eos>")} == {
        "<unk>"
    }
    assert len(tables.proposals) == 258


def test_both_forms_of_a_byte_stay_distinct(tmp_path: Path) -> None:
    tables = match(tmp_path, sentencepiece(["A", "B"]), sentencepiece(["B", "A"]))
    assert tables.proposals == {**{i: i for i in range(258)}, 258: 259, 259: 258}
    assert tables.draft_ids[:260] == (*range(258), 259, 258)
    assert tables.coverage == 1


def test_a_draft_with_too_few_tokens_is_refused(tmp_path: Path) -> None:
    target = tokenizer()
    ids = target.encode(SAMPLE).ids
    frequent = [i for i, _ in Counter(ids).most_common()]
    shares = []
    for count in range(1, len(frequent)):
        words = [target.id_to_token(i) for i in frequent[:count]]
        draft = Tokenizer(models.WordLevel({token: i for i, token in enumerate(words)}, unk_token=words[0]))
        draft.decoder = decoders.ByteLevel()
        share = sum(i in frequent[:count] for i in ids) / len(ids)
        if share >= MIN_COVERAGE:
            tables = match(tmp_path, target, draft)
            assert tables.coverage == share
            break
        shares.append(share)
        with pytest.raises(VocabularyMismatch, match=f"has {share:.0%} of the tokens .* and 50% are needed; take a dr"):
            match(tmp_path, target, draft)
    assert len(shares) > 3


def test_other_rules_of_equal_tokens_need_no_map(tmp_path: Path) -> None:
    """The draft reads the target's tokens, however its own tokenizer would have split the text."""
    assert match(tmp_path, tokenizer(), tokenizer(lowercase=True)) is None


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "eagle", "medusa"])
def test_a_head_with_the_tokenizer_of_another_target_is_refused(method: Any, tmp_path: Path) -> None:
    target, head = saved(tmp_path / "a", tokenizer()), saved(tmp_path / "b", tokenizer(special=("<eos>", "<more>")))
    expect_vocabulary(method, head, target)
    saved(head, sentencepiece(["A"]))
    with pytest.raises(VocabularyMismatch, match="only a draft of method draft-model may have another vocabulary"):
        expect_vocabulary(method, head, target)
    (head / "tokenizer.json").unlink()
    expect_vocabulary(method, head, target)


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
    draft = CausalLM(causal_lm_config(shape)).requires_grad_(False)
    randomise(draft, 5)
    before = draft.logits(draft(TOKENS, torch.arange(11), dense).hidden_TE)
    set_vocabulary(draft, VocabularyMatch((96, 3, 3, 0), {3: 1, 96: 0}), 4)
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
