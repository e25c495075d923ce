"""Request bodies of the HTTP API, as pydantic models that validate them once.

There are three kinds of fields: supported fields (the models of this package), fields without effect on the output
(dropped), and unsupported fields with an effect on the output. Of the latter, a neutral value is dropped and any other
value is refused with an error that names the field.
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
