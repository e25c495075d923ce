"""Ids of requests, which are in responses, logs and ids of events."""

from __future__ import annotations

import re

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def valid_request_id(text: str) -> bool:
    """Return whether an id that a client sent can be used: it is valid in a header."""
    return _REQUEST_ID.fullmatch(text) is not None
