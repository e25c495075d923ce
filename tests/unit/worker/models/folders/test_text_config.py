"""End tokens of model folders, which name them in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fields import Fields, end_tokens, read_config, sampling_defaults
from specdecode_worker.models.vocabulary import read_tokenizer
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.training.conversations import Chat
from support import small_model
from support.published.tokens import TOKENS, tokenizer_of

END, S_END = small_model.END_ID, small_model.VOCAB_SIZE + TOKENS.index("</s>")


def all_end_tokens(folder: Path) -> tuple[int, ...]:
    return end_tokens(folder, Fields(read_config(folder)).integers("eos_token_id"))


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "tokens"),
    [
        (0, [2, 0], None, (0, 2)),
        (None, 7, None, (7,)),
        (3, None, "<|end|>", (3, END)),
        (None, None, {"content": "</s>", "lstrip": False}, (S_END,)),
        ([5, 3], [5], "absent", (3, 5)),
        (None, None, "a", (64,)),
        (None, None, None, ()),
    ],
)
def test_end_tokens_of_all_files(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, tokens: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.6}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    tokenizer_of("text").save(str(tmp_path / "tokenizer.json"))
    assert all_end_tokens(tmp_path) == tokens


def test_a_folder_without_the_other_files_has_those_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert all_end_tokens(tmp_path) == (4,)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer_of("text").save(str(tmp_path / "tokenizer.json"))
    assert all_end_tokens(tmp_path) == (4, END)


@pytest.mark.parametrize("document", ['{"eos_token_id": "two"}', '{"eos_token_id": [true]}', "{"])
def test_a_wrong_file_is_named(tmp_path: Path, document: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(document)
    with pytest.raises(ConfigMismatch, match=r"generation_config\.json"):
        all_end_tokens(tmp_path)


@pytest.mark.parametrize("document", [{"added_tokens": [1, {"content": ["a"]}]}, {"added_tokens": 1}, {"model": [1]}])
def test_a_tokenizer_of_another_form_has_no_end_token(tmp_path: Path, document: dict[str, Any]) -> None:
    """The tokenizer itself is refused by name when it is read."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert all_end_tokens(tmp_path) == (4,)


def test_a_loaded_target_has_them(tmp_path: Path) -> None:
    """Serving, training and evaluation read them from the target."""
    small_model.write_target(tmp_path, config={"eos_token_id": 1})
    beyond_embedding = small_model.VOCAB_SIZE
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [2, {beyond_embedding}]}}')
    target = load_causal_lm(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert target.config.eos_token_ids == (1, 2, END)


def test_sampling_defaults_are_the_fields_that_vllm_reads(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    given = {"temperature": 0.6, "top_p": None, "top_k": 50, "do_sample": True, "bos_token_id": 1, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 50}


LISTED = {"267": {"content": "<|late|>", "special": True}, "266": {"content": "<tag>", "normalized": False}}


def test_tokens_that_only_the_files_beside_it_name_are_whole(tmp_path: Path) -> None:
    """Serving, training, grammars and the match of vocabularies read the same tokens as transformers."""
    tokenizer_of("text").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    given = {"added_tokens_decoder": LISTED, "eos_token": "<|late|>", "pad_token": "<|pad|>", "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "a<|late|> <tag>b<|pad|></s>"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ids[1] == 267
    given["added_tokens_decoder"] = {"x": {"content": "no"}, "268": "no", "269": {}, **LISTED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(text) == Chat(tmp_path).encode(text) == read_tokenizer(tmp_path).encode(text).ids == ids
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a <tag>b</s>"
    assert all_end_tokens(tmp_path) == (267,)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_folder(tmp_path).digest != tokenizer.digest
