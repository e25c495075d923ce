"""Tracer that sends spans to an OpenTelemetry collector by OTLP over HTTP.

The SDK reads its own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES and the
others of the OpenTelemetry specification. Its packages are imported only where an endpoint is set. Spans are exported
by a thread of the SDK in batches; if the collector does not answer, spans are dropped and requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from specdecode_router.errors import CannotStart
from specdecode_router.telemetry.tracing import NoTracer, Span, Tracer, trace_headers

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
_FLUSH_SECONDS = 3.0
"""Time for the last spans at the end of the process."""


@contextlib.asynccontextmanager
async def open_tracer(environment: Mapping[str, str] | None = None) -> AsyncIterator[Tracer]:
    """Yield the tracer that the environment asks for, and send its last spans after the block.

    Raises:
        CannotStart: An endpoint is set, and the packages of the extra ``tracing`` are not installed.
    """
    variables = os.environ if environment is None else environment
    disabled = variables.get(_DISABLED_VARIABLE, "").lower() == "true"
    if disabled or not any(variables.get(name) for name in ENDPOINT_VARIABLES):
        yield NoTracer()
        return
    tracer = OtlpTracer()
    try:
        yield tracer
    finally:
        # A daemon thread: a collector that does not answer must not keep the process from ending.
        flush = threading.Thread(target=tracer.shut_down, daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, _FLUSH_SECONDS)


class OtlpTracer:
    """Maker of spans that are exported."""

    def __init__(self) -> None:
        """Start the exporter. Raises CannotStart if its packages are not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise CannotStart(f"an endpoint for traces is set, and {error.name} is missing: "
                              "install specdecode[tracing]") from None  # fmt: skip
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        name = os.environ.get("OTEL_SERVICE_NAME") or "specdecode-router"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("specdecode_router")

    @contextlib.contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """Yield a span that continues the trace of the headers, if they have one. An error of the block fails it."""
        kind = self._trace.SpanKind.CLIENT
        context = self._propagator.extract(trace_headers(headers))
        span = self._tracer.start_span(name, context, kind, record_exception=False)
        made = _OtlpSpan(span, self._trace, self._propagator)
        try:
            yield made
        except Exception as error:
            made.fail(str(error) or type(error).__name__)
            raise
        finally:
            span.end()

    def shut_down(self) -> None:
        """Send the last spans and end the exporter."""
        self._provider.shutdown()


class _OtlpSpan:
    """Span of the SDK."""

    def __init__(self, span: Any, trace: Any, propagator: Any) -> None:
        self._span, self._trace = span, trace
        self._headers: dict[str, str] = {}
        propagator.inject(self._headers, trace.set_span_in_context(span))

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers with the context of this span."""
        return self._headers

    def set_attribute(self, name: str, value: str | int | float) -> None:
        """Add an attribute."""
        self._span.set_attribute(name, value)

    def fail(self, message: str) -> None:
        """Mark the span as failed."""
        self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))
