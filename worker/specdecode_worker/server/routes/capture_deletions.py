"""Route of the admin port that deletes the captured requests of a user, for a token with the scope operator.

The user is in the body, so that no access log has it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from specdecode_worker.capture.errors import FolderUnusable
from specdecode_worker.contract import Route
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.requests.body_parser import parse_contract
from specdecode_worker.server.requests.user_deletion import UserDeletion
from specdecode_worker.server.routes.http_app import read_body
from specdecode_worker.server.service import Service


def add_capture_deletions(app: FastAPI, service: Service) -> None:
    """Add the route to ``app``. Deletions run one after the other, in a thread of their own."""
    thread = ThreadPoolExecutor(1, "capture-deletions")

    @app.post(Route.capture_deletions)
    async def delete_captures(request: Request) -> Response:
        user = parse_contract(UserDeletion, await read_body(request)).user
        if service.recorder is None:
            raise HTTPException(404, "this worker does not capture traffic")
        service.check_loaded()
        capture = service.capture
        assert capture is not None, "a loaded worker with a recorder captures requests"
        try:
            counts = await asyncio.get_running_loop().run_in_executor(thread, partial(capture.delete_user, user))
        except FolderUnusable as error:
            raise Unavailable(str(error), code="capture_folder") from None
        return JSONResponse(asdict(counts))
