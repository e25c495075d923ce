"""Spans of requests and attempts, as a collector receives them by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specdecode_router.errors import CannotStart
from specdecode_router.telemetry.otlp import OtlpTracer, open_tracer
from specdecode_router.telemetry.tracing import NoTracer
from support.router_harness import router_over
from support.stand_in_worker import Script

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = json.dumps({"messages": [], "stream": True}).encode()


@dataclass
class Collector:
    """Receiver of spans."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    service: str = ""

    async def receive(self, request: web.Request) -> web.Response:
        """Take the spans of a batch."""
        body = await request.read()
        exported = ExportTraceServiceRequest.FromString(
            gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
        )
        for resource in exported.resource_spans:
            self.service = {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        """Return the spans of a name in the order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Yield a collector on a free port."""
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_one_span_for_each_attempt_continues_the_trace_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        async with open_tracer() as tracer, router_over(Script(move_at=5), Script(move_at=5), tracer=tracer) as router:
            for worker in router.workers:
                worker.script.move_at = 5
            # Whichever worker is chosen first moves the stream away; the other one ends it.
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            status, _, _ = await router.post(CHAT, data=BODY, headers=headers)
            assert status == 200
            urls = [worker.url for worker in router.workers]
            contexts = [context for worker in router.workers for context in worker.traceparents]
    (request,) = received.named("specdecode.request")
    attempts = received.named("specdecode.attempt")
    assert received.service == "specdecode-router"
    assert {span.trace_id.hex() for span in received.spans} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in attempts} == {request.span_id}
    first, *_, last = map(attributes, attempts)
    assert (first["specdecode.outcome"], first["specdecode.resume_index"]) == ("moved", 0)
    assert last["specdecode.resume_index"] >= 5
    assert {one["specdecode.worker"] for one in map(attributes, attempts)} <= set(urls)
    assert {context.split("-")[2] for context in contexts} == {span.span_id.hex() for span in attempts}
    assert attributes(request)["url.path"] == CHAT


async def test_failed_attempts_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        async with open_tracer() as tracer, router_over(Script(close_at=3), tracer=tracer) as router:
            await router.post(CHAT, data=BODY)
    failed = received.named("specdecode.attempt")[0]
    assert failed.status.code == 2
    assert "not completed" in failed.status.message
    assert attributes(failed)["specdecode.outcome"] == "failed"
    (request,) = received.named("specdecode.request")
    assert request.status.code == 2
    assert not request.parent_span_id


@pytest.mark.slow
async def test_a_collector_that_is_gone_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    async with open_tracer() as tracer:
        async with router_over(Script(), tracer=tracer) as router:
            status, _, _ = await router.post(CHAT, data=BODY)
            assert status == 200
        ended = time.monotonic()
    assert time.monotonic() - ended < 30, "the end of the process does not wait for the collector"


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
async def test_without_an_endpoint_nothing_is_recorded(environment: dict[str, str]) -> None:
    async with open_tracer(environment) as tracer:
        assert isinstance(tracer, NoTracer)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(CannotStart, match=r"install specdecode\[tracing\]"):
        OtlpTracer()
