"""Headers for streams whose events have ids, and for the rest of such a stream.

Ids are only sent to clients that ask for them: many clients read an event as one line that begins with ``data:``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from specdecode_router.errors import ApiError
from specdecode_router.relay.client_stream import ClientStream
from specdecode_router.relay.event_ids import EventPosition, StreamIdentity, parse_event_id, request_digest
from specdecode_router.relay.numbered_stream import NumberedStream
from specdecode_worker.contract.internal_stream import OpenStream

EVENT_IDS_HEADER = "X-Specdecode-Event-Ids"
LAST_EVENT_ID_HEADER = "Last-Event-ID"
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class NumberedRequest:
    """Request for a stream with ids."""

    identity: StreamIdentity
    after: EventPosition | None
    """Position behind the last event that the client has; None for a new stream."""

    def open_stream(self, stream: OpenStream) -> OpenStream:
        """Return the request for a worker."""
        identity, after = self.identity, self.after
        return msgspec.structs.replace(
            stream,
            request_id=identity.request_id,
            seed=identity.seed,
            created=identity.created,
            delivered=None if after is None else after.delivered,
        )

    def client_stream(self, client: ClientStream) -> ClientStream:
        """Return the stream of the client with ids."""
        return NumberedStream(client, self.identity, self.after)


def numbered_request(
    headers: Mapping[str, str], route: str, fields: dict[str, Any], *, tenant: str, request_id: str, created: int
) -> NumberedRequest | None:
    """Return what the headers ask for; None for a stream without ids.

    Args:
        headers: Headers of the request.
        route: Public path.
        fields: Body of the request; empty if it is no object.
        tenant: Name of the client.
        request_id: Id of a new stream.
        created: Unix time of a new stream.

    Raises:
        ApiError: 400, the last id is none of a stream of this request.
    """
    last = headers.get(LAST_EVENT_ID_HEADER, "").strip()
    if not last and not _wants_ids(headers):
        return None
    digest = request_digest(route, fields, tenant)
    if not last:
        if fields.get("stream") is not True:
            return None
        seed = secrets.randbits(_SEED_BITS)
        return NumberedRequest(
            StreamIdentity(request_id=request_id, created=created, seed=seed, request_digest=digest), None
        )
    try:
        identity, after = parse_event_id(last)
    except ValueError as error:
        raise _invalid(
            LAST_EVENT_ID_HEADER, f"{error}; send the whole id of the last event that you received"
        ) from None
    if identity.request_digest != digest:
        raise _invalid(LAST_EVENT_ID_HEADER, "it is of another request; send the path, API key and body of the request "
                       "whose stream broke, or leave the header out to begin again")  # fmt: skip
    return NumberedRequest(identity, after)


def _wants_ids(headers: Mapping[str, str]) -> bool:
    text = headers.get(EVENT_IDS_HEADER, "false").strip().lower()
    if text not in ("true", "false"):
        raise _invalid(EVENT_IDS_HEADER, "it must be true or false")
    return text == "true"


def _invalid(header: str, message: str) -> ApiError:
    return ApiError(400, f"{header}: {message}", kind="invalid_request_error", code="invalid_value", param=header)
