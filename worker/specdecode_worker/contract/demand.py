"""Requests that routers hold, as they report them to the operator: the data of the ConfigMap ``<name>-demand``.

Each router writes one entry under its own name, and removes it when it holds nothing. The operator starts workers while
an entry is fresh. An entry of a router that died becomes stale by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, ValidationError

from specdecode_worker.contract.wire import Received

REFRESH_SECONDS = 10.0
"""Time between two writes of an entry while requests are held."""
FRESH_SECONDS = 60.0
"""Age beyond which an entry counts no more. Some refreshes may fail, and two clocks differ by seconds."""


class HeldRequests(Received):
    """Requests that one router holds because no worker is ready."""

    requests: int = Field(ge=1)
    oldest_seconds: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Time for which the oldest of them has waited."""
    at: float = Field(allow_inf_nan=False)
    """Time of the report by the router's clock, in seconds since the epoch."""


def read_demand(data: Mapping[str, str]) -> dict[str, HeldRequests]:
    """Return the readable entries of the ConfigMap by router."""
    entries = {}
    for router, text in data.items():
        try:
            entries[router] = HeldRequests.model_validate_json(text)
        except ValidationError:
            continue  # an entry of a version that this one does not know must not hide the others
    return entries


def held_requests(entries: Mapping[str, HeldRequests], now: float) -> int:
    """Return the number of requests in fresh entries. An entry from the future is fresh: clocks differ."""
    return sum(entry.requests for entry in entries.values() if now - entry.at <= FRESH_SECONDS)
