"""Folders after the layouts of published models: texts and token ids are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdecode_worker.models.errors import TemplateRefused
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.training.conversations import Chat
from support.published.folders import layouts, write_layout

LAYOUTS = layouts()
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
    return (PreTrainedTokenizerFast if kind == "LlamaTokenizer" else AutoTokenizer).from_pretrained(folder)


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
