"""Tests of tokenization, chat templates and incremental detokenization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from specdecode_worker.models.chat_template import find_template
from specdecode_worker.models.errors import TemplateRefused, TokenizerProblem
from specdecode_worker.server.tools import Tokenizer


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


class CountedModel:
    """Tokenizer of the library that counts how often its vocabulary is counted."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model, self.counts = model, 0

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        self.counts += 1
        return int(self._model.get_vocab_size(with_added_tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_vocabulary_is_counted_once(tokenizer: Tokenizer) -> None:
    model: Any = CountedModel(tokenizers.Tokenizer.from_str(tokenizer.json))
    counted = Tokenizer(model, None)
    assert [counted.vocab_size for _ in range(3)] == [tokenizer.vocab_size] * 3
    assert model.counts == 1
