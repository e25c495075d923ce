"""Tests of the tokenization of texts that may be far too long."""

from __future__ import annotations

import threading

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from specdecode_worker.server import tools as text_tokenizer
from specdecode_worker.server.prompts import TextTooLong, TextWorkStopped, encode_bounded

fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def byte_bpe() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("aa", "aa")]
    vocab = {letter: i for i, letter in enumerate([*alphabet, "aa", "aaaa"])}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return model


@given(text=st.text(alphabet="a b1", max_size=400), most=st.integers(4, 40))
@fixture_is_constant
def test_texts_that_fit_are_never_refused(text: str, most: int) -> None:
    tokenizer = text_tokenizer.Tokenizer(byte_bpe(), None)
    ids = tokenizer.encode(text)
    try:
        assert encode_bounded(tokenizer, text, most, threading.Event()) == ids
    except TextTooLong:
        assert len(ids) > most


def test_text_without_end_is_refused_after_a_beginning_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, longest = text_tokenizer.Tokenizer(byte_bpe(), None), 0

    def encode(text: str, **options: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return text_tokenizer.Tokenizer.encode(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    with pytest.raises(TextTooLong):
        encode_bounded(tokenizer, "a" * 1_000_000, 100, threading.Event())
    assert longest <= 8 * 100 * 2, "four letters a token, twice the context, and one doubling"


def test_work_stops_once_it_is_cancelled() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(TextWorkStopped):
        encode_bounded(text_tokenizer.Tokenizer(byte_bpe(), None), "a", 4, stopped)
