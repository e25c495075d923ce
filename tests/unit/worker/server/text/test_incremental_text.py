"""Tests of incremental detokenization against decoding all tokens at once, and of its cost per token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from specdecode_worker.models import fetch as model_store
from specdecode_worker.server.tools import Tokenizer

SPECIAL, UNKNOWN = 256, 300
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
gaps = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 40]), st.booleans()), max_size=5)


@pytest.fixture(scope="session")
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(
        model_store.resolve("embedded://smollm2-135m-instruct", model_store.default_cache_dir())
    )


def shown(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip: bool = True) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()


def with_gaps(ids: list[int], gaps: list[tuple[int, int, bool]], special: int, unknown: int) -> list[int]:
    """Return ``ids`` with runs of tokens without text, given as (place, length, is special), in between."""
    mixed = list(ids)
    for place, length, is_special in gaps:
        mixed[place:place] = [special if is_special else unknown] * length
    return mixed


@given(text=st.text(alphabet="ab é你✨\n"), gaps=gaps)
@fixture_is_constant
def test_tokens_without_text_change_no_text(tokenizer: Tokenizer, text: str, gaps: list[tuple[int, int, bool]]) -> None:
    ids = with_gaps(tokenizer.encode(text), gaps, SPECIAL, UNKNOWN)
    assert shown(tokenizer, [], ids) == tokenizer.decode(ids) == text


@given(text=st.text(), gaps=gaps, prompt=st.sampled_from(["", "a prompt", "你"]))
@fixture_is_constant
def test_tokens_without_text_change_no_text_of_a_real_tokenizer(
    real_tokenizer: Tokenizer, text: str, gaps: list[tuple[int, int, bool]], prompt: str
) -> None:
    ids = with_gaps(real_tokenizer.encode(text, add_special_tokens=False), gaps, 1, 10**6)
    assert shown(real_tokenizer, real_tokenizer.encode(prompt), ids) == real_tokenizer.decode(ids)


@given(text=st.text(alphabet="ab é你✨"), gaps=gaps)
@fixture_is_constant
def test_shown_special_tokens_decode_as_in_one_call(
    tokenizer: Tokenizer, text: str, gaps: list[tuple[int, int, bool]]
) -> None:
    ids = with_gaps(tokenizer.encode(text), gaps, SPECIAL, UNKNOWN)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown(tokenizer, [], ids, skip=False).replace("\ufffd", "") == whole.replace("\ufffd", "")


@given(ids=st.lists(st.integers(0, 49151), max_size=60))
@fixture_is_constant
def test_any_token_ids_decode_as_in_one_call(real_tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = real_tokenizer.decode(ids)
    assert shown(real_tokenizer, [], ids).replace("\ufffd", "") == whole.replace("\ufffd", "")


def byte_fallback() -> Tokenizer:
    """Return a tokenizer in the form of SentencePiece that writes all but a few letters as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(made, None)


def check_splits(tokenizer: Tokenizer, text: str) -> None:
    """Check that prompt and output have the whole text wherever the tokens are split, also within a character."""
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        prompt = tokenizer.decode_complete(ids[:cut])
        assert prompt + shown(tokenizer, ids[:cut], ids[cut:]) == whole, cut
        assert "\ufffd" not in prompt or "\ufffd" in text


WITHIN_CHARACTERS = ["🙂", "a🙂b", " é 你✨🙂🙂 ab", "✨✨✨✨", "a \ufffd", "\ufffd\ufffdé"]


@pytest.mark.parametrize("text", WITHIN_CHARACTERS)
def test_prompts_that_end_within_a_character(tokenizer: Tokenizer, real_tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, real_tokenizer, byte_fallback()):
        check_splits(one, text)


@given(text=st.text(alphabet="ab é你✨🙂\n"))
@fixture_is_constant
def test_any_prompt_that_ends_within_a_character(tokenizer: Tokenizer, real_tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, real_tokenizer, byte_fallback()):
        check_splits(one, text)


def test_an_incomplete_character_of_the_prompt_alone_has_no_text(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("🙂")[:2]
    assert shown(tokenizer, prompt, []) == shown(tokenizer, prompt, [SPECIAL]) == ""
    assert shown(tokenizer, prompt, tokenizer.encode("a")) == "\ufffda"


def empty_words() -> Tokenizer:
    """Return a tokenizer whose token 0 is not special and has no text."""
    words = tokenizers.Tokenizer(models.WordLevel({"": 0, "▁a": 1}, unk_token=""))
    words.decoder = decoders.Metaspace()
    return Tokenizer(words, None)


def test_long_runs_of_ordinary_tokens_without_text_change_no_text() -> None:
    ids = [1, *[0] * 100, 1, 0, 1]
    assert shown(empty_words(), [], ids) == empty_words().decode(ids) == "a a a"


@pytest.mark.parametrize("token", [SPECIAL, UNKNOWN, 0x80])
def test_cost_per_token_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    assert _longest_decode(tokenizer, [token] * 2000, monkeypatch) <= 64


def test_cost_per_ordinary_token_without_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _longest_decode(empty_words(), [0] * 2000, monkeypatch) <= 64


def _longest_decode(tokenizer: Tokenizer, ids: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the largest number of tokens that one push decodes."""
    lengths = [0]
    decode = tokenizer.decode

    def counted(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    shown(tokenizer, [], ids)
    return max(lengths)
