"""Choice of the tool call parser for a model. The names are those of vLLM's --tool-call-parser."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_worker.contract import ToolFormat
from specdecode_worker.server.tools.deltas import ToolParser
from specdecode_worker.server.tools.hermes import HermesParser
from specdecode_worker.server.tools.llama3_json import Llama3JsonParser
from specdecode_worker.server.tools.pythonic import PythonicParser

# Text in the chat template that identifies the format, most specific first.
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters":', "llama3_json"),
)


def format_of(template_source: str) -> ToolFormat | None:
    """Return the tool call format that a chat template asks for; None if it cannot be recognized."""
    return next((name for mark, name in _MARKS if mark in template_source), None)


def parser_for(name: ToolFormat, functions: Sequence[str], *, streams: bool = False) -> ToolParser:
    """Return a parser for one choice of a request that offers ``functions``.

    With ``streams``, which needs a grammar of the calls, arguments are returned as they arrive where the format allows.
    """
    is_offered = frozenset(functions).__contains__
    match name:
        case "hermes":
            return HermesParser(streams=streams)
        case "llama3_json":
            return Llama3JsonParser(is_offered, streams=streams)
        case "pythonic":
            return PythonicParser(is_offered)
