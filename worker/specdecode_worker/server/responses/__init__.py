"""OpenAI's response objects, as plain dicts with the fields in OpenAI's order."""

from specdecode_worker.server.responses.chat import ChatWriter, ToolCallOptions
from specdecode_worker.server.responses.completion import CompletionWriter
from specdecode_worker.server.responses.objects import Choice, ChoicePiece, ScoredToken, Statistics
from specdecode_worker.server.responses.usage import metrics, usage
from specdecode_worker.server.responses.writer import DONE, Json, ResponseContext, ResponseWriter, event

__all__ = [
    "DONE",
    "ChatWriter",
    "Choice",
    "ChoicePiece",
    "CompletionWriter",
    "Json",
    "ResponseContext",
    "ResponseWriter",
    "ScoredToken",
    "Statistics",
    "ToolCallOptions",
    "event",
    "metrics",
    "usage",
]
