"""Trace context of requests: headers that are passed on to workers, and the interface of a tracer.

Without a tracer the client's context goes to the worker unchanged. A tracer makes a span for each attempt on a worker
and passes the context of that span on.

Reference: W3C Trace Context, https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_LENGTH_OF_VERSION_00 = 55
"""Only later versions may append fields."""
_MAX_TRACESTATE = 512
"""Characters of ``tracestate`` that the specification requires to be passed on."""
_PRINTABLE = re.compile(r"[ -~\t]*")


class Span(Protocol):
    """One attempt on a worker."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for the worker."""

    def set_attribute(self, name: str, value: str | int | float) -> None:
        """Add an attribute."""

    def fail(self, message: str) -> None:
        """Mark the attempt as failed."""


class Tracer(Protocol):
    """Maker of spans."""

    def span(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """Return a span that ends with its block.

        Args:
            name: Name of the span.
            headers: Headers of the client, which may have a trace context.
        """


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context of the client's headers; empty if it has none or an invalid one.

    Args:
        headers: Headers with names in lower case, or a mapping that ignores case.
    """
    parent = headers.get("traceparent", "").strip()
    if not _TRACEPARENT.fullmatch(parent) or (parent.startswith("00") and len(parent) != _LENGTH_OF_VERSION_00):
        return {}
    state = headers.get("tracestate", "").strip()
    usable = state and len(state) <= _MAX_TRACESTATE and _PRINTABLE.fullmatch(state)
    return {"traceparent": parent, **({"tracestate": state} if usable else {})}


@dataclass(frozen=True, slots=True)
class _NoSpan:
    """Span that is not recorded."""

    headers: Mapping[str, str] = field(default_factory=dict)

    def set_attribute(self, name: str, value: str | int | float) -> None:
        """Do nothing."""

    def fail(self, message: str) -> None:
        """Do nothing."""


class NoTracer:
    """Tracer that records nothing and passes the client's context on."""

    @contextlib.contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """Yield a span that is not recorded."""
        yield _NoSpan(trace_headers(headers))
