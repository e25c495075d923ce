"""Folders after the layouts of published models: texts, token ids and chat templates are those of transformers.

Folders name their end tokens in several files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdecode_worker.models.chat_template import find_template
from specdecode_worker.models.errors import ConfigMismatch, TemplateRefused, TokenizerProblem
from specdecode_worker.models.fields import Fields, end_tokens, read_config, sampling_defaults
from specdecode_worker.models.vocabulary import read_tokenizer
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.training.conversations import Chat
from support import small_model
from support.published.folders import layouts, write_layout
from support.published.tokens import TOKENS, tokenizer_of

TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
GENERATION = (
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}\n"
    "    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% set ns.n = 1 %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content | trim }}{{ sep_token }}{% endif %}{% endfor %}{{ ns.n }}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
VARIABLES = (
    "{{ bos_token is defined }} {{ unk_token is defined }} {{ documents is none }} {{ image_token is defined }}"
    "{{ image_token }} {{ messages[:1] | tojson(separators=(',', ':')) }} {{ messages[:1] | tojson(indent=1) }}"
)
OLDER = {"bos_token": {"content": "<s>", "lstrip": False}, "sep_token": "<|end|>"}
FOLDERS: dict[str, dict[str, Any]] = {
    "key": {"tokenizer_config.json": {"chat_template": TURNS}},
    "generation": {"tokenizer_config.json": {"chat_template": GENERATION, "sep_token": "|", "bos_token": "<s>"}},
    "older special tokens": {"tokenizer_config.json": {"chat_template": GENERATION}, "special_tokens_map.json": OLDER},
    "listed tokens": {
        "tokenizer_config.json": {"chat_template": GENERATION, "bos_token": "<|start|>", "added_tokens_decoder": {
            "256": {"content": "<|start|>", "special": True}}},
        "special_tokens_map.json": OLDER,
    },
    "variables": {"tokenizer_config.json": {"chat_template": VARIABLES, "bos_token": "<s>", "extra_special_tokens": {
        "image_token": "<|start|>"}}},
    "no tokens": {"tokenizer_config.json": {"chat_template": VARIABLES, "eos_token": None}},
    "file": {"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": TURNS},
    "several files": {
        "tokenizer_config.json": {}, "chat_template.jinja": TURNS,
        "additional_chat_templates/tool_use.jinja": "tools: {{ tools | tojson }}" + TURNS,
        "additional_chat_templates/rag.jinja": "rag",
    },
    "list": {"tokenizer_config.json": {"chat_template": [
        {"name": "default", "template": TURNS}, {"name": "tool_use", "template": "{{ tools | length }}" + TURNS}]}},
    "names": {"tokenizer_config.json": {"chat_template": {"default": TURNS, "tool_use": "{{ tools | length }}"}}},
    "list and file": {
        "tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "listed"}]},
        "chat_template.jinja": "{{ tools | length if tools else 0 }}" + TURNS,
    },
    "file of a processor": {"tokenizer_config.json": {"chat_template": TURNS},
                            "chat_template.json": {"chat_template": "no"}},
}  # fmt: skip
BYTES = small_model.byte_tokenizer(("<s>",))
LAYOUTS = layouts() | {name: (BYTES, files) for name, files in FOLDERS.items()}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {
    "name": "weather", "description": "Sky & wind <now>", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Åre"}}}
USER = {"role": "user", "content": " The 1234 hells, <|im_end|> and </think> it? \n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>\nso\n</think>\n\nHello!"}
PARTS = [{"type": "text", "text": "the one"}, {"type": "text", "text": "two"}]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]] = {
    "question": ([USER], [], {}),
    "system": ([SYSTEM, USER, ANSWER, USER], [], {}),
    "tools": ([SYSTEM, USER], TOOLS, {}),
    "call": ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
              {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "clear"}], TOOLS, {}),
    "reasoning": ([USER, {"role": "assistant", "content": "Hm.", "reasoning_content": "because\n"}], [], {}),
    "variables": ([USER], [], {"enable_thinking": False, "date_string": "1 Jan 2030"}),
    "an error": ([ANSWER, ANSWER], [], {}),
}  # fmt: skip


def reference(folder: Path) -> Any:
    """Return transformers' tokenizer of tokenizer.json.

    The class LlamaTokenizer of transformers 5 builds another one: it leaves out the space that SentencePiece puts
    before a text behind a special token, which tokenizer.json and Meta's own code have.
    """
    kind = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    return (PreTrainedTokenizerFast if kind in (None, "LlamaTokenizer") else AutoTokenizer).from_pretrained(folder)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "parts"])
def test_texts_and_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_layout(tmp_path, *LAYOUTS[name])
    theirs, ours, trained = reference(folder), Tokenizer.from_folder(folder), Chat(folder)
    template = ours.chat_template()
    for case, (messages, tools, variables) in CONVERSATIONS.items():
        given = {"tools": tools or None, **variables}
        for start in (True, False):
            try:
                text = theirs.apply_chat_template(messages, add_generation_prompt=start, tokenize=False, **given)
            except Exception:
                with pytest.raises(TemplateRefused):
                    template.render(messages, tools, variables, add_generation_prompt=start)
                continue
            assert template.render(messages, tools, variables, add_generation_prompt=start) == text, case
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, add_special_tokens=False) == trained.encode(text) == ids, case
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), case
    messages = [USER, {"role": "assistant", "content": "The sky is "}]
    try:
        text = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    except Exception:
        text = None
    if text is not None:
        given = {"add_generation_prompt": False, "continue_final_message": True}
        assert template.render(messages, **given) == text
    for text in ("the hell", " [INST] a", "Åre <tool_call>", ""):
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if "parts" in name or name in ("llama 3.2 vision", "llama 4")]
)
def test_templates_that_iterate_parts_get_them(tmp_path: Path, name: str) -> None:
    folder = write_layout(tmp_path, *LAYOUTS[name])
    messages = [{"role": "user", "content": PARTS}]
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    template = Tokenizer.from_folder(folder).chat_template()
    assert template.render(messages, add_generation_prompt=False) == text
    assert "the one" in text
    alone = [{"role": "user", "content": PARTS[:1]}]
    assert template.render([{"role": "user", "content": "the one"}]) == template.render(alone)


def test_other_templates_get_one_text(tmp_path: Path) -> None:
    template = Tokenizer.from_folder(write_layout(tmp_path, *LAYOUTS["qwen 3"])).chat_template()
    parts, joined = [{"role": "user", "content": PARTS}], [{"role": "user", "content": "the one\ntwo"}]
    assert template.render(parts) == template.render(joined)


MESSAGES: Any = [SYSTEM, USER, ANSWER, {"role": "user", "content": "go"}]


def test_further_templates_alone_leave_the_default(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"chat_template": TURNS}, "additional_chat_templates/tool_use.jinja": "tools"}
    template = find_template(write_layout(tmp_path, BYTES, files))
    assert template.render(MESSAGES[3:]) == "<|start|>user\ngo<|end|>\n"
    assert template.render(MESSAGES, TOOLS) == "tools"


def test_another_template_is_used_instead(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, *LAYOUTS["several files"])
    (tmp_path / "other.jinja").write_text("other {{ bos_token }}")
    for given, text in ((str(tmp_path / "other.jinja"), "other "), ("text {{ messages | length }}", "text 4")):
        template = find_template(folder, given)
        assert template.render(MESSAGES) == template.render(MESSAGES, TOOLS) == text


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": [{"name": "default"}]}},
        {"tokenizer_config.json": {"chat_template": ["text"]}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": None}]}},
        {"tokenizer_config.json": {"chat_template": 5}},
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": {}, "chat_template.jinja": "{% generation %}"},
        {"tokenizer_config.json": {}, "chat_template.jinja": "{% unknown %}"},
    ],
)
def test_a_broken_template_is_named(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(TokenizerProblem, match="chat template"):
        find_template(write_layout(tmp_path, BYTES, files))
    write_layout(tmp_path, BYTES, {"tokenizer_config.json": {}})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerProblem, match="chat template"):
        find_template(tmp_path)
    with pytest.raises(TokenizerProblem, match="absent"):
        find_template(tmp_path, "absent.jinja")


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
