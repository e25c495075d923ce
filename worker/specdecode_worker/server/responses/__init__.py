"""OpenAI's response objects, as plain dicts with the fields in OpenAI's order."""

from specdecode_worker.server.responses.chat import ChatFormat, ToolReading
from specdecode_worker.server.responses.completion import CompletionFormat
from specdecode_worker.server.responses.objects import Choice, Piece, Scored, Statistics
from specdecode_worker.server.responses.usage import metrics, usage
from specdecode_worker.server.responses.writer import DONE, Format, Head, Json, event

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
