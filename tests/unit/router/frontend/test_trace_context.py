"""Tests of the trace context that is passed on to workers."""

from __future__ import annotations

import pytest

from specdecode_router.frontend.request_headers import trace_headers
from support.router_harness import router_over
from support.stand_in_worker import Script

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_valid_context_is_passed_on_unchanged() -> None:
    context = {"traceparent": PARENT, "tracestate": "vendor=1,other=a b"}
    assert trace_headers({**context, "authorization": "Bearer secret"}) == context
    later_version = {"traceparent": PARENT.replace("00-4", "01-4") + "-more"}
    assert trace_headers(later_version) == later_version


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nothing",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        PARENT.replace("00f067aa0ba902b7", "0" * 16),
        PARENT + "\r\nx: y",
    ],
)
def test_an_invalid_context_is_dropped_with_its_state(parent: str) -> None:
    assert trace_headers({"traceparent": parent, "tracestate": "vendor=1"}) == {}


@pytest.mark.parametrize("state", ["x" * 513, "a=1\r\nx: y", "a=\u00fc"])
def test_an_invalid_state_is_dropped_alone(state: str) -> None:
    assert trace_headers({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


async def test_the_context_of_the_client_reaches_the_worker() -> None:
    async with router_over(Script()) as router:
        await router.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": PARENT})
        assert router.workers[0].traceparents == [PARENT]
