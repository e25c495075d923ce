"""Deadlines of a request, from its header and the configuration."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.admission import RequestTerms, read_timeout, terms_of
from specdecode_worker.server.errors import BadRequest

CONFIG = ServerConfig(request_timeout_seconds=100, queue_timeout_seconds=20)


def test_terms_without_header() -> None:
    assert terms_of("", Headers(), CONFIG, now=1000.0) == RequestTerms(
        deadline_seconds=1100.0, queue_deadline_seconds=1020.0
    )


def test_terms_with_header_and_key() -> None:
    headers = Headers({"X-Request-Timeout": "2.5"})
    assert terms_of("ann", headers, CONFIG, now=1000.0) == RequestTerms(
        "ann", deadline_seconds=1002.5, queue_deadline_seconds=1020.0
    )


def test_header_does_not_raise_the_default() -> None:
    assert read_timeout("1e6", 100) == 100


@pytest.mark.parametrize("header", ["", "0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s"])
def test_invalid_header(header: str) -> None:
    with pytest.raises(BadRequest, match="positive number") as refused:
        read_timeout(header, 100)
    assert refused.value.param == "X-Request-Timeout"
