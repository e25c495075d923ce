"""Chat template of a model, rendered in a Jinja sandbox because it comes with the weights and is not trusted.

Templates are found as transformers finds them: the files ``chat_template.jinja`` and
``additional_chat_templates/*.jinja``, else the key ``chat_template`` of ``tokenizer_config.json``, which holds one
template or named ones. ``default`` is used, and ``tool_use`` for requests with tools. Templates see the
functions and variables that transformers gives them. Serving and training use this module.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdecode_worker.models.errors import ConfigMismatch, TemplateRefused, TokenizerProblem
from specdecode_worker.models.fields import TEMPLATE_FOLDER, read_optional, special_tokens

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024
"""Longest text that a template may render: twice the largest request body, as templates add to each message."""

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
            self._forms = [_form_of_content(environment.parse(text)) for text in (source, self.tool_source)]
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
        continue_final_message: bool = False,
    ) -> str:
        """Render the prompt text of a conversation, in any time and memory that the template takes.

        Args:
            messages: The turns of the conversation.
            tools: Tool definitions that the model may call.
            variables: Further template variables (`chat_template_kwargs` of the request).
            add_generation_prompt: End the text with the start of the assistant's turn.
            continue_final_message: End the text with the content of the last message.

        Raises:
            TemplateRefused: The template failed on these messages, or rendered more than MAX_RENDERED_CHARACTERS.
        """
        template, form = (self._with_tools if tools else self._template), self._forms[bool(tools)]
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        given = {
            **self.special_tokens,
            "documents": None,
            **variables,
            "messages": [_in_form(message, form) for message in messages],
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _joined(template.generate(given))
        except MemoryError:
            raise TemplateRefused("the model's chat template needs too much memory for these messages") from None
        except Exception as error:  # a template is untrusted code and can raise anything
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from None
        return _before_mark(text) if continue_final_message else text


def find_template(folder: Path, given: str | None = None) -> ChatTemplate | None:
    """Load the chat template of a model folder; None for a base model without one.

    Args:
        folder: Folder of the model.
        given: Template to use instead of the folder's: a file, or the text of the template.

    Raises:
        TokenizerProblem: The template or a file cannot be read or parsed.
    """
    try:
        config = read_optional(folder / "tokenizer_config.json")
        tokens = special_tokens(folder)
        sources = {"default": _given(given)} if given is not None else _sources(folder, config)
    except (ConfigMismatch, OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise TokenizerProblem(f"the chat template of {folder} cannot be read: {error!s}") from None
    if not sources:
        return None
    return ChatTemplate(sources.get("default") or next(iter(sources.values())), tokens, sources.get("tool_use"))


def _given(template: str) -> str:
    """Return the text of a template that is given as its text, which has braces, or as the name of a file."""
    return template if "{" in template else Path(template).read_text(encoding="utf-8")


def _sources(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return template sources by name. A template without a name is ``default``."""
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if "default" in sources or (listed := config.get("chat_template")) is None:
        return sources
    if isinstance(listed, list):
        listed = {entry["name"]: entry["template"] for entry in listed}
    named = listed if isinstance(listed, dict) else {"default": listed}
    if not all(isinstance(part, str) for entry in named.items() for part in entry):
        raise TypeError("chat_template must be a text, or texts by name")
    return named | sources  # further files alone replace no default; transformers refuses such a folder


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks the answers of the assistant for training. It changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body as a block with a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


# Content of a message is a text or a list of parts. Clients send either; most templates read only texts, and others
# iterate the parts.

_Form = Literal["text", "parts", "either"]


def _form_of_content(template: nodes.Template) -> _Form:
    """Return the form of content that a template reads: parts if it iterates them, either if it tests for texts too."""
    names = {macro.name: [one.name for one in macro.args] for macro in template.find_all(nodes.Macro)}
    aliases: set[str] = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            pairs = zip(names.get(call.node.name, ()), call.args, strict=False)
            aliases |= {name for name, given in pairs if _is_content(given, aliases)}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, aliases):
            aliases.add(assignment.target.name)
    if not any(_is_content(loop.iter, aliases) for loop in template.find_all(nodes.For)):
        return "text"
    return "either" if any(test.name == "string" for test in template.find_all(nodes.Test)) else "parts"


def _is_content(node: nodes.Node | None, aliases: Collection[str]) -> bool:
    """Return whether an expression is the content of a message, perhaps filtered."""
    match node:
        case nodes.Filter():
            return _is_content(node.node, aliases)
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Name():
            return node.name in aliases
        case _:
            return False


def _in_form(message: Message, form: _Form) -> Message:
    """Return a message with its content in the form that the template reads. Joined parts have lines of their own."""
    content = message.get("content")
    if isinstance(content, list) and form == "text":
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if isinstance(content, str) and form == "parts":
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    return message


# The last message is continued as in transformers: a mark behind its content says where the rendered text ends. A
# template that trims content trims the space of the mark, and with it the text's own.

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def _marked(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}


def _before_mark(text: str) -> str:
    """Return the text before the last mark. Raises TemplateRefused without one."""
    before, mark, rest = text.rpartition(_MARK.strip())
    if not mark:
        raise TemplateRefused("the model's chat template leaves out the last message, which is to be continued")
    return before if rest.startswith(" ") else before.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, but models were fine-tuned on text without these escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
