"""Tests of the bytes of single tokens, for byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from specdecode_worker.server.tools import Tokenizer, Vocabulary
from support.small_model import byte_tokenizer


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None)
    joined = b"".join(tokenizer.vocabulary.bytes_of(token) for token in tokenizer.encode(text))
    assert joined.decode() == text


def test_sentencepiece_writes_spaces_and_bytes() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "<0x0A>": 1, "é": 2}, unk_token="é"))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    words.add_special_tokens(["</s>"])
    vocabulary = Vocabulary(words)
    assert [vocabulary.bytes_of(token) for token in (0, 1, 2, 3, 99)] == [b" a", b"\n", "é".encode(), b"</s>", b""]
    assert (vocabulary.piece_of(0), vocabulary.piece_of(99)) == ("▁a", "")
