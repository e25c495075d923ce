"""Tests of the bound of a text's bytes per token, by which too long texts are refused without tokenizing."""

from __future__ import annotations

import sys
import threading
import unicodedata

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from specdecode_worker.server import tokenizer as text_tokenizer
from specdecode_worker.server.chat_template import TextTooLong, TextWorkStopped, encode_bounded
from specdecode_worker.server.tokenizer import NFC_SHRINKAGE, most_bytes_per_token

fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def byte_bpe() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("aa", "aa")]
    vocab = {letter: i for i, letter in enumerate([*alphabet, "aa", "aaaa"])}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return model


def sentencepiece_bpe() -> tokenizers.Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    model = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "a")], byte_fallback=True)
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return model


@pytest.mark.parametrize("model", [byte_bpe(), sentencepiece_bpe()], ids=["byte-level", "byte-fallback"])
@given(text=st.text() | st.text(alphabet="a ", min_size=20))
@fixture_is_constant
def test_no_text_has_more_bytes_than_its_tokens_can_stand_for(model: tokenizers.Tokenizer, text: str) -> None:
    most = most_bytes_per_token(model)
    assert most is not None
    assert len(text.encode()) <= most * len(model.encode(text).ids)


@given(text=st.text(alphabet="e\u0301각힣\u1100\u1161\u11a8 ", min_size=1))
@fixture_is_constant
def test_bound_covers_composed_characters(text: str) -> None:
    model = byte_bpe()
    model.normalizer = normalizers.NFC()
    most = most_bytes_per_token(model)
    assert most is not None
    assert len(text.encode()) <= most * len(model.encode(text).ids)


def test_shrinkage_of_nfc_is_the_largest_over_all_characters() -> None:
    letters = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    ratios = [
        len(unicodedata.normalize("NFD", one).encode()) / len(one.encode())
        for one in letters
        if unicodedata.normalize("NFC", one) == one
    ]
    assert max(ratios) == NFC_SHRINKAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "normalizer", normalizers.Strip()),
        lambda model: setattr(model, "normalizer", normalizers.NFKC()),
        lambda model: setattr(model, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda model: setattr(model, "normalizer", normalizers.Replace("aa", "a")),
        lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda model: setattr(model, "pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda model: setattr(model, "model", models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        lambda model: setattr(model, "model", models.BPE(vocab={"a": 0}, merges=[])),
        lambda model: model.add_special_tokens([AddedToken("<|x|>", rstrip=True)]),
    ],
    ids=["strip", "nfkc", "collapse", "shrink", "whitespace", "removed", "wordpiece", "unknown", "rstrip"],
)
def test_no_bound_is_claimed_where_characters_can_vanish(change) -> None:  # type: ignore[no-untyped-def]
    model = byte_bpe()
    change(model)
    assert most_bytes_per_token(model) is None


@given(text=st.text(alphabet="a b1", max_size=400), most=st.integers(4, 40))
@fixture_is_constant
def test_texts_that_fit_are_never_refused(text: str, most: int) -> None:
    tokenizer = text_tokenizer.Tokenizer(byte_bpe(), None)
    ids = tokenizer.encode(text)
    try:
        assert encode_bounded(tokenizer, text, most, threading.Event()) == ids
    except TextTooLong:
        assert len(ids) > most


def test_work_stops_once_it_is_cancelled() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(TextWorkStopped):
        encode_bounded(text_tokenizer.Tokenizer(byte_bpe(), None), "a", 4, stopped)
