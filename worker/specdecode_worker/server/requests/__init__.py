"""What clients may send, checked once at the edge.

Three kinds of fields: those that are honoured (the models here), those that change no answer (dropped), and those
that would change the answer and are not supported: their neutral values are dropped, others refused by name.
"""

from specdecode_worker.server.requests.body_parser import bad_request, parse
from specdecode_worker.server.requests.chat import ChatRequest
from specdecode_worker.server.requests.common import GenerationRequest
from specdecode_worker.server.requests.completion import CompletionRequest
from specdecode_worker.server.requests.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "TokenizeChatRequest",
    "TokenizeRequest",
    "bad_request",
    "parse",
]
