"""Which parser reads a model's answers. Names are those of vLLM's --tool-call-parser."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_worker.contract import ToolFormat
from specdecode_worker.server.tools.deltas import ToolParser
from specdecode_worker.server.tools.hermes import HermesParser
from specdecode_worker.server.tools.llama3_json import Llama3JsonParser
from specdecode_worker.server.tools.pythonic import PythonicParser

# What a template tells the model to write, most telling first.
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters":', "llama3_json"),
)


def format_of(template_source: str) -> ToolFormat | None:
    """How a model with this chat template writes its calls, as far as the template says."""
    return next((name for mark, name in _MARKS if mark in template_source), None)


def parser_for(name: ToolFormat, functions: Sequence[str]) -> ToolParser:
    """A parser for one answer to a request that offers ``functions``."""
    known = frozenset(functions).__contains__
    match name:
        case "hermes":
            return HermesParser()
        case "llama3_json":
            return Llama3JsonParser(known)
        case "pythonic":
            return PythonicParser(known)
