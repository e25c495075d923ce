"""OpenAI's response objects, as plain dicts in the order in which OpenAI writes them."""

from specdecode_worker.server.answers.chat import ChatFormat, ToolReading
from specdecode_worker.server.answers.completion import CompletionFormat
from specdecode_worker.server.answers.format import DONE, Format, Head, Json, event
from specdecode_worker.server.answers.parts import Choice, Piece, Scored, Statistics
from specdecode_worker.server.answers.sums import metrics, usage

__all__ = [
    "DONE",
    "ChatFormat",
    "Choice",
    "CompletionFormat",
    "Format",
    "Head",
    "Json",
    "Piece",
    "Scored",
    "Statistics",
    "ToolReading",
    "event",
    "metrics",
    "usage",
]
