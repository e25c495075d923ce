"""Workers on model folders as they are published, asked over HTTP, with and without speculation, and through a router.

The models are small and random. A grammar with one choice makes them write a given text, in the tokens in which their
tokenizer writes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.contract import Plan, Report, Route, TreeShape
from support import small_model
from support.published.tokens import SIZE, Kind, tokenizer_of
from support.worker_process import RouterProcess, WorkerProcess, real, running_router

pytestmark = pytest.mark.slow

WEATHER: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
GENERATION_END = tokenizer_of("text").token_to_id("</s>")
TEMPLATE = small_model.TEMPLATE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
VERSIONS = itertools.count(1)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@dataclass
class Asked:
    """Client of one worker with one plan."""

    url: str
    """Of the worker, or of the router before it."""
    kind: Kind

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 3}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body | fields, timeout=60)

    def complete(self, **fields: Any) -> Any:
        body = {"model": "small", "prompt": "abcdef", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body | fields, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def choice(self, **fields: Any) -> Any:
        answer = self.chat(**fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def says(self, text: str, **fields: Any) -> Any:
        """Return the choice of a model that writes this text."""
        return self.choice(structured_outputs={"choice": [text]}, **fields)

    def streamed(self, text: str, **fields: Any) -> Any:
        """Return the message of a model that writes this text, put together from the chunks of a stream."""
        answer = self.chat(**{"structured_outputs": {"choice": [text]}, **fields}, stream=True)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        message: Any = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        for delta in (json.loads(line)["choices"][0]["delta"] for line in lines):
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(part)
                else:
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        return message


@pytest.fixture(scope="module", params=["text", "special"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerProcess, RouterProcess, Kind]]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    sizes = {"vocab_size": SIZE, "max_position_embeddings": 2048, "eos_token_id": None}
    words = small_model.flags(target, draft)
    words += ["--cache-dir", str(tmp_path_factory.mktemp("cache")), "--reasoning-parser", "qwen3"]
    template = TEMPLATE
    small_model.write_draft(draft, config=sizes)
    if request.param == "special":
        file = tmp_path_factory.mktemp("template") / "chat.jinja"
        file.write_text(TEMPLATE)
        words += ["--chat-template", str(file), "--generation-config", "vllm"]
        template = "{% unknown %}"
        publish_as_pickle(draft)
    small_model.write_target(target, config=sizes, template=template)
    generation = {"eos_token_id": [GENERATION_END], "temperature": 0.0, "top_k": 3, "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation))
    tokenizer_of(request.param).save(str(target / "tokenizer.json"))
    logs = tmp_path_factory.mktemp("log")
    with real(words, logs / "log") as started:
        started.wait_ready()
        with running_router([started.admin], logs / "log-router", started.admin_token) as router:
            router.wait_ready()
            yield started, router, request.param
        report = Report.model_validate(started.call_admin(Route.report).json())
        assert report.draft.problem is None
        assert min(report.start.read, report.start.fuse, report.start.compile, report.start.calibrate) > 0
        assert report.drafts > 0, "the answers with a tree must be speculative"


def publish_as_pickle(draft: Path) -> None:
    """Store a head as pytorch_model.bin, without the output matrix that it shares with the target."""
    state = load_file(draft / "model.safetensors")
    torch.save(
        {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, draft / "pytorch_model.bin"
    )
    (draft / "model.safetensors").unlink()


@pytest.fixture(params=[("none", "worker"), ("tree:4,2,1", "router")], ids="-".join)
def asked(servers: tuple[WorkerProcess, RouterProcess, Kind], request: pytest.FixtureRequest) -> Asked:
    """Return a client of a worker that speculates, or does not. The guard is off: it would end speculation here."""
    worker, router, kind = servers
    shape, through = request.param
    plan = Plan(version=next(VERSIONS), initial=TreeShape.parse(shape), max_depth=6, top_k=4, guard=False)
    answer = worker.call_admin(Route.plan, "PUT", content=plan.model_dump_json())
    assert answer.status_code == 200, answer.text
    return Asked(worker.public if through == "worker" else router.public, kind)


def test_the_token_of_the_tag_begins_a_strict_call(asked: Asked) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    tag = tokenizer_of(asked.kind).token_to_id("<tool_call>")
    choice = asked.choice(tools=strict, logit_bias={str(tag): 100}, parallel_tool_calls=False)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("text", ["<think>ok</think>", "</s>", "a<|python_tag|>b", "[TOOL_CALLS]", "<a b>"])
def test_text_that_names_a_token_is_returned(asked: Asked, text: str) -> None:
    assert asked.says(text)["message"]["content"] == text
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    answer_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert json.loads(asked.choice(response_format=answer_format)["message"]["content"]) == {"a": text}


@pytest.mark.parametrize("end", [small_model.END_ID, GENERATION_END])
def test_an_answer_ends_at_the_end_tokens_of_all_files(asked: Asked, end: int) -> None:
    """config.json names none, tokenizer_config.json the first and generation_config.json the other."""
    answer = asked.chat(logit_bias={str(end): 100}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


TEXTS: dict[str, str] = {}
"""Texts of requests, which must be the same with and without speculation."""


def same_text(asked: Asked, name: str, text: str) -> str:
    assert TEXTS.setdefault(f"{name} {asked.kind}", text) == text
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_in_no_answer(asked: Asked, temperature: float) -> None:
    def say(words: list[str]) -> str:
        fields = {"bad_words": words, "temperature": temperature, "max_tokens": 60, "min_tokens": 30}
        text: str = asked.choice(**fields)["message"]["content"]
        return same_text(asked, f"{words} {temperature}", text)

    words: list[str] = []
    for start in (0, 3, 9):
        text = say(words)
        assert not any(word in text for word in words)
        words.append(text[start : start + 2])
    assert all(words), "there was nothing to forbid"


def test_other_tokens_than_the_allowed_ones_are_not_sampled(asked: Asked) -> None:
    allowed = small_model.byte_tokenizer().encode("abc ").ids
    fields = {"allowed_token_ids": allowed, "temperature": 1.0, "max_tokens": 80, "repetition_penalty": 1.5}
    text = same_text(asked, "allowed", asked.choice(**fields)["message"]["content"])
    assert len(text) == 80
    assert set(text) <= set("abc ")
    assert len(set(text)) > 1, "their own probabilities count"


def test_the_end_of_a_prompt_is_kept(asked: Asked) -> None:
    cut, short = asked.complete(truncate_prompt_tokens=3, echo=True), asked.complete(prompt="def", echo=True)
    assert cut["choices"][0]["text"] == short["choices"][0]["text"]
    assert cut["usage"]["prompt_tokens"] == 3
    long = asked.complete(prompt="x" * 3000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 2048 - 8
    chat = asked.chat(truncate_prompt_tokens=5, max_tokens=4).json()
    assert chat["usage"]["prompt_tokens"] == 5


def test_the_last_message_is_continued(asked: Asked) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sky "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\nThe sky "
    ids = httpx.post(f"{asked.url}/tokenize", json=fields).json()["tokens"]
    assert ids == tokenizer_of(asked.kind).encode(prompt).ids
    completion = asked.complete(prompt=prompt, max_tokens=20)
    continued = asked.choice(**fields, max_tokens=20, temperature=0)["message"]["content"]
    assert continued == completion["choices"][0]["text"]


def test_the_template_is_rendered(asked: Asked) -> None:
    """It has the tag ``generation``. One of the workers gets it by a flag, and its folder has a broken one."""
    answer = httpx.post(f"{asked.url}/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    text = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert httpx.post(f"{asked.url}/tokenize", json={"messages": parts}).json() == answer.json()
    assert answer.json()["tokens"] == tokenizer_of(asked.kind).encode(text).ids


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("null", {}),
        ('{"city": "a\n\tb"}', {"city": "a\n\tb"}),
        ("[]", None),
        ('{"city": no}', None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_written_call_is_valid_or_text_and_accepted_as_history(
    asked: Asked, arguments: str, read: Any, stream: bool
) -> None:
    text = CALL.replace('{"city": "Oslo"}', arguments)
    message = asked.streamed(text, tools=TOOLS) if stream else asked.says(text, tools=TOOLS)["message"]
    if read is None:
        assert message["content"] == text
        assert not message.get("tool_calls")
    else:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == read
    result = {"role": "tool", "tool_call_id": "none", "content": "15"}
    if read is not None:
        result["tool_call_id"] = message["tool_calls"][0]["id"]
    asked.choice(messages=[{"role": "user", "content": "hi"}, message, result], tools=TOOLS, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_apart_whatever_its_tags_are(asked: Asked, stream: bool) -> None:
    """The model closes its thinking at once, and writes the tag again and again."""
    prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    fields: Any = {"messages": prompt, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 3}
    close = tokenizer_of(asked.kind).token_to_id("</think>")
    fields |= {"logit_bias": {str(close): 100}, "tools": TOOLS, "structured_outputs": None}
    message = asked.streamed("", **fields) if stream else asked.choice(**fields)["message"]
    assert not message["reasoning_content"]
    assert message["content"] == "</think></think>"


def test_a_forced_call_that_is_cut_is_accepted_as_history(asked: Asked) -> None:
    """It is text: what leaves as a call has arguments that are a JSON object."""
    message = asked.streamed("", tools=TOOLS, tool_choice="required", structured_outputs=None, max_tokens=44)
    assert message["tool_calls"] == []
    assert '"name": "weather"' in message["content"]
    asked.choice(messages=[{"role": "user", "content": "hi"}, message], tools=TOOLS, max_tokens=1)


def test_sampling_defaults_are_those_of_the_model(asked: Asked) -> None:
    """generation_config.json asks for temperature 0. The worker with ``--generation-config vllm`` ignores it."""

    def texts(**fields: Any) -> set[str]:
        # No two letters in a row can be the same: these models like to repeat themselves.
        pattern = {"regex": "[a-f][g-m][n-z][0-4][5-9][A-F][G-M][N-Z]"}
        answers = [asked.choice(seed=seed, structured_outputs=pattern, **fields) for seed in range(6)]
        return {answer["message"]["content"] for answer in answers}

    assert (len(texts()) == 1) == (asked.kind == "text")
    assert len(texts(temperature=1.5)) > 1, "a field of the request counts more"
    assert len(texts(temperature=0)) == 1
