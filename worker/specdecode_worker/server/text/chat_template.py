"""Chat template of a model, rendered in a Jinja sandbox because it comes with the weights and is not trusted.

Templates are found by the convention of Hugging Face: the file ``chat_template.jinja``, else the key ``chat_template``
of ``chat_template.json`` or ``tokenizer_config.json``. The value of the key is one template, or a list of named
templates: ``default`` is used, and ``tool_use`` for requests with tools.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdecode_worker.server.errors import TemplateRefused, TokenizerProblem

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024
"""Longest text that a template may render: twice the largest request body, as templates add to each message."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

Message = Mapping[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """Renderer of chat messages in the format on which the model was fine-tuned."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source
        self.special_tokens = special_tokens
        """Texts of the special tokens by name, such as ``bos_token``."""
        self.tool_source = tool_source or source
        """Source of the template that is used for requests with tools."""
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(self.tool_source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(self.tool_source))
        except jinja2.TemplateError as error:
            raise TokenizerProblem(f"the model's chat template cannot be read: {error}") from None

    @property
    def digest_source(self) -> str:
        """Text that changes with everything that a rendered conversation depends on besides the request."""
        return json.dumps([self.source, self.tool_source, dict(self.special_tokens)])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the prompt text of a conversation, in any time and memory that the template takes.

        Args:
            messages: The turns of the conversation.
            tools: Tool definitions that the model may call.
            variables: Further template variables (`chat_template_kwargs` of the request).
            add_generation_prompt: End the text with the start of the assistant's turn.

        Raises:
            TemplateRefused: The template failed on these messages, or rendered more than MAX_RENDERED_CHARACTERS.
        """
        template = self._with_tools if tools else self._template
        given = {
            **self.special_tokens,
            **variables,
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _joined(template.generate(given))
        except MemoryError:
            raise TemplateRefused("the model's chat template needs too much memory for these messages") from None
        except Exception as error:  # a template is untrusted code and can raise anything
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from None


def find_template(folder: Path) -> ChatTemplate | None:
    """Load the chat template of a model folder; None for a base model without one.

    Raises:
        TokenizerProblem: The template or a JSON file cannot be parsed.
    """
    config = _read_object(folder / "tokenizer_config.json")
    sources = _sources(folder, config)
    if not sources:
        return None
    tokens = {name: _text_of(config.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(sources.get("default") or next(iter(sources.values())), tokens, sources.get("tool_use"))


def _sources(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return template sources by name. A template without a name is ``default``."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return {"default": own_file.read_text()}
    for templates in (_read_object(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(templates, str):
            return {"default": templates}
        if isinstance(templates, list):
            return {str(entry["name"]): str(entry["template"]) for entry in templates}
    return {}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment


def _joined(chunks: Iterable[str]) -> str:
    """Join the chunks of a rendered text. Raises OverflowError beyond MAX_RENDERED_CHARACTERS."""
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > MAX_RENDERED_CHARACTERS:
            raise OverflowError(f"it rendered more than {MAX_RENDERED_CHARACTERS} characters")
    return "".join(parts)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, but models were fine-tuned on text without these escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text_of(token: Any) -> str:
    """Return the text of a special token: the token itself, or the key ``content`` if it is an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if the file is missing or holds another type. Raises TokenizerProblem."""
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerProblem(f"{path} is no JSON: {error}") from None
    return parsed if isinstance(parsed, dict) else {}
