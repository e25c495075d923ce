"""Tokenization, incremental detokenization against decoding all tokens at once, bytes of tokens, and stop strings."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.chat_template import find_template
from specdecode_worker.models.errors import TemplateRefused, TokenizerProblem
from specdecode_worker.server.requests import MAX_STOP_CHARACTERS
from specdecode_worker.server.tools import StopFinder, Tokenizer, Vocabulary
from support.small_model import byte_tokenizer


def test_incomplete_character_is_held_until_flush(tokenizer: Tokenizer) -> None:
    first, second, third = tokenizer.encode("你")
    detokenizer = tokenizer.detokenizer([])
    assert [detokenizer.push(first), detokenizer.push(second)] == ["", ""]
    assert detokenizer.push(third) == "你"
    detokenizer.push(first)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_invalid_bytes_are_released(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("你")[1]
    detokenizer = tokenizer.detokenizer([])
    assert any(detokenizer.push(continuation) for _ in range(64))


def test_spaces_that_depend_on_the_previous_token_are_preserved() -> None:
    # Llama 2's tokenizer drops the space before the first word that it decodes.
    words = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    words.decoder = decoders.Metaspace()
    for prompt, expected in (([0], [" b", " a", " b"]), ([], ["b", " a", " b"])):
        detokenizer = Tokenizer(words, None).detokenizer(prompt)
        assert [detokenizer.push(token) for token in (1, 0, 1)] == expected


def _folder(tmp_path: Path, template: object) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}})
    )
    return tmp_path


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_failing_and_unsafe_templates_are_refused(tmp_path: Path, template: str) -> None:
    chat_template = find_template(_folder(tmp_path, template))
    with pytest.raises(TemplateRefused):
        chat_template.render([{"role": "user", "content": "hi"}])


def test_missing_and_invalid_tokenizer_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(TokenizerProblem, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerProblem, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerProblem, match="chat template cannot be read"):
        find_template(_folder(tmp_path, "{% if %}"))
    assert find_template(tmp_path / "elsewhere") is None


def test_vocabulary_is_counted_once(tokenizer: Tokenizer) -> None:
    model = Mock(wraps=tokenizers.Tokenizer.from_str(tokenizer.json))
    counted = Tokenizer(model, None)
    assert [counted.vocab_size for _ in range(3)] == [tokenizer.vocab_size] * 3
    model.get_vocab_size.assert_called_once()


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


@given(text=st.text(alphabet="ab é你✨🙂\ufffd\n"))
@fixture_is_constant
def test_any_prompt_that_ends_within_a_character(tokenizer: Tokenizer, real_tokenizer: Tokenizer, text: str) -> None:
    """Prompt and output have the whole text wherever the tokens are split."""
    for one in (tokenizer, real_tokenizer, byte_fallback()):
        ids = one.encode(text)
        for cut in range(len(ids) + 1):
            prompt = one.decode_complete(ids[:cut])
            assert prompt + shown(one, ids[:cut], ids[cut:]) == one.decode(ids), cut
            assert "\ufffd" not in prompt or "\ufffd" in text


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


letters = st.text(alphabet="ab", max_size=12)


@given(text=letters, stop=st.text(alphabet="ab", min_size=1, max_size=4), cuts=st.sets(st.integers(0, 12)))
def test_text_is_cut_at_the_first_stop_string(text: str, stop: str, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    finder = StopFinder((stop,))
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += finder.push(text[start:end])
        assert stop not in shown
    if finder.matched is None:
        shown += finder.flush()
    assert shown == text.partition(stop)[0]
    assert (finder.matched == stop) == (stop in text)


@given(early=letters, text=letters, stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_a_stop_string_may_begin_where_none_may_end(early: str, text: str, stop: str) -> None:
    finder = StopFinder((stop,))
    shown = "".join(finder.push(letter, may_end=False) for letter in early)
    shown += "".join(finder.push(letter) for letter in text)
    whole = early + text
    ends = [end for end in range(len(early) + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    assert finder.matched == (stop if ends else None)
    assert shown + finder.flush() == (whole[: ends[0] - len(stop)] if ends else whole)


@given(text=letters, stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_a_possible_stop_prefix_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(tuple(stops))
    shown = "".join(finder.push(letter) for letter in text)
    if finder.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(text=letters, stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_stop_string_that_begins_first_in_a_piece_ends_the_text(text: str, stops: list[str]) -> None:
    finder = StopFinder(tuple(stops))
    shown = finder.push(text)
    begins = [text.find(stop) for stop in stops if stop in text]
    assert shown + finder.flush() == (text[: min(begins)] if begins else text)


@pytest.mark.parametrize("pieces", [[" " * 20_000], [" "] * 20_000], ids=["at once", "a letter at a time"])
def test_work_grows_with_the_text_alone(pieces: list[str]) -> None:
    held = MAX_STOP_CHARACTERS - 1
    finder = StopFinder((" " * held + "x", *("y" * number + " " * held for number in (1, 2, 3))))
    began = time.process_time()
    assert sum(len(finder.push(piece)) for piece in pieces) == 20_000 - held
    assert finder.push("z") == " " * held + "z"
    assert time.process_time() - began < 1, "the whole of the held text was searched for each letter"
