"""Client side of a request, as the relay writes to it."""

from __future__ import annotations

from typing import Protocol

from specdecode_router.errors import RouterError
from specdecode_worker.contract.internal_stream import Error, Open, Step


class ClientStream(Protocol):
    """Response to the client. All but ``write`` wait while the client reads too slowly; all raise ClientGone."""

    def accepts(self, opened: Open) -> bool:
        """Return whether the response can begin with this frame."""

    async def open(self, opened: Open) -> None:
        """Begin the response, if it is one of server-sent events. The opening events go with the first step."""

    async def write(self, step: Step) -> None:
        """Send the server-sent events of a step, without waiting. The first step of a choice may have none."""

    async def drain(self) -> None:
        """Wait while the client has too much to read."""

    async def end(self, body: bytes) -> None:
        """Send the last events or the whole body, and finish the response."""


class ClientGone(RouterError):
    """Error for a client that disconnected, or read nothing for too long."""


class RefusedByWorker(RouterError):
    """Error of a worker that is sent to the client unchanged."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"a worker refused the request with status {error.status}")
        self.error, self.status = error, error.status
