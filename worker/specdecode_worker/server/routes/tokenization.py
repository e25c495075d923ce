"""Routes /tokenize and /detokenize, with the fields of vLLM."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from specdecode_worker.server.errors import BadRequest, TemplateRefused, TokenizerProblem
from specdecode_worker.server.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parse
from specdecode_worker.server.requests.body_parser import build, read_object
from specdecode_worker.server.routes.http_app import read_body
from specdecode_worker.server.service import Service
from specdecode_worker.server.text.tokenizer import Tokenizer


def add_tokenization(app: FastAPI, service: Service) -> None:
    """Add the routes /tokenize and /detokenize."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = read_object(await read_body(request))
        body: TokenizeRequest | TokenizeChatRequest
        body = build(TokenizeChatRequest, fields) if "messages" in fields else build(TokenizeRequest, fields)
        service.check_model_name(body.model)
        tokenizer = service.model.tokenizer
        ids = await asyncio.to_thread(_ids, tokenizer, body)
        pieces = [tokenizer.vocabulary.piece_of(token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": service.model.loaded.max_model_len,
                "tokens": ids,
                "token_strs": pieces,
            }
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeRequest, await read_body(request))
        service.check_model_name(body.model)
        tokenizer = service.model.tokenizer
        if any(token >= tokenizer.vocab_size for token in body.tokens):
            raise BadRequest(f"token ids must lie in 0..{tokenizer.vocab_size - 1}", param="tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})


def _ids(tokenizer: Tokenizer, body: TokenizeRequest | TokenizeChatRequest) -> list[int]:
    """Return the token ids of the request. Raises BadRequest if the chat template does not accept the messages."""
    if isinstance(body, TokenizeRequest):
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    messages = [message.rendered() for message in body.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    try:
        text = tokenizer.chat_template().render(
            messages, tools, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
        )
    except (TemplateRefused, TokenizerProblem) as error:
        raise BadRequest(str(error), param="messages", code="invalid_value") from None
    return tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
