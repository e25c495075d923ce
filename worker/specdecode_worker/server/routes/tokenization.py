"""Routes /tokenize and /detokenize, with the fields of vLLM."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from specdecode_worker.server.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parse
from specdecode_worker.server.requests.body_parser import build, read_object
from specdecode_worker.server.routes.http_app import cancel_on_disconnect, read_body
from specdecode_worker.server.service import Service


def add_tokenization(app: FastAPI, service: Service) -> None:
    """Add the routes /tokenize and /detokenize."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = read_object(await read_body(request))
        body: TokenizeRequest | TokenizeChatRequest
        body = build(TokenizeChatRequest, fields) if "messages" in fields else build(TokenizeRequest, fields)
        service.check_model_name(body.model)
        vocabulary = service.model.tokenizer.vocabulary
        ids = await cancel_on_disconnect(request, service.prompts.tokenize(body))
        pieces = [vocabulary.piece_of(token) for token in ids] if body.return_token_strs else None
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
        text = await cancel_on_disconnect(request, service.prompts.detokenize(body.tokens))
        return JSONResponse({"prompt": text})
