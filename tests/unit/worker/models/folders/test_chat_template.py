"""Chat templates of model folders, found and rendered as transformers does, for serving and for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdecode_worker.models.chat_template import find_template
from specdecode_worker.models.errors import TokenizerProblem
from specdecode_worker.training.conversations import Chat
from support import small_model

MESSAGES: Any = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'h"i é <b>'},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go"},
]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
GENERATION = (
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}\n"
    "    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% set ns.n = 1 %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content | trim }}{{ sep_token }}{% endif %}{% endfor %}{{ ns.n }}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
VARIABLES = (
    "{{ bos_token is defined }} {{ unk_token is defined }} {{ documents is none }} {{ image_token is defined }}"
    "{{ image_token }} {{ messages | tojson(separators=(',', ':')) }} {{ messages | tojson(indent=1) }}"
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


def write(folder: Path, files: dict[str, Any]) -> Path:
    small_model.byte_tokenizer(("<s>",)).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_text_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, FOLDERS[name])
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), find_template(folder)
    for tools in ((), TOOLS):
        for start in (True, False):
            text = theirs.apply_chat_template(
                MESSAGES, tools=list(tools) or None, add_generation_prompt=start, tokenize=False
            )
            assert ours.render(MESSAGES, tools, add_generation_prompt=start) == text
    assert Chat(folder).render(MESSAGES) == ours.render(MESSAGES)


def test_further_templates_alone_leave_the_default(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"chat_template": TURNS}, "additional_chat_templates/tool_use.jinja": "tools"}
    template = find_template(write(tmp_path, files))
    assert template.render(MESSAGES[3:]) == "<|start|>user\ngo<|end|>\n"
    assert template.render(MESSAGES, TOOLS) == "tools"


def test_another_template_is_used_instead(tmp_path: Path) -> None:
    folder = write(tmp_path, FOLDERS["several files"])
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
        find_template(write(tmp_path, files))
    write(tmp_path, {"tokenizer_config.json": {}})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerProblem, match="chat template"):
        find_template(tmp_path)
    with pytest.raises(TokenizerProblem, match="absent"):
        find_template(tmp_path, "absent.jinja")
