"""Workers' admin ports: reads reports, pushes plans. Whatever a worker answers, a reconcile goes on.

A report is refused by name: too large, no JSON, a field out of its type, a negative or infinite number, another
contract. What is merely unknown comes from a newer worker and is ignored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from specdecode_operator.errors import BadReport, WorkerError, WorkerUnreachable
from specdecode_worker.contract import CONTRACT_VERSION, FEATURES, MAX_REPORT_BYTES, Header, Plan, Port, Report, Route

TIMEOUT_SECONDS = 2.0
MAX_TAG = 128
_TRIANGLE = len(FEATURES) * (len(FEATURES) + 1) // 2


@dataclass(frozen=True, slots=True)
class Reading:
    """A report, and the tag by which the worker knows it again."""

    report: Report
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Nothing has changed since the reading with that tag but the worker's clock."""

    clock_seconds: float


class WorkerClient:
    """A client of all workers' admin ports, through ``proxy`` where pods cannot be reached directly.

    Made on the event loop. It keeps no connection: most workers are asked once a minute, ten thousand open sockets
    would wait for that, and a server closes them sooner.
    """

    def __init__(self, *, proxy: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        # A proxy of the environment is not used: it knows nothing of pod addresses.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_seconds, sock_read=timeout_seconds),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            proxy=proxy,
        )

    async def close(self) -> None:
        await self._http.close()

    async def report(self, address: str, token: str, known: str = "") -> Reading | Unchanged:
        """``known`` is the tag of the last reading. Raises WorkerUnreachable or BadReport."""
        headers = {"If-None-Match": known} if known else {}
        response, body = await self._call("GET", address, Route.report, token, headers=headers)
        if known and response.status == 304:
            return Unchanged(_clock(response))
        return Reading(read_report(body), response.headers.get("ETag", "")[:MAX_TAG])

    async def push(self, address: str, token: str, plan: Plan) -> None:
        """Raises WorkerUnreachable, or WorkerError when the worker refuses the plan."""
        await self._call("PUT", address, Route.plan, token, content=plan.model_dump_json().encode())

    async def _call(
        self,
        method: str,
        address: str,
        route: str,
        token: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Raises WorkerError for everything but success, and but the 304 that ``headers`` ask for."""
        host = f"[{address}]" if ":" in address else address
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
        url = f"http://{host}:{Port.admin}{route}"
        try:
            # A redirect is not followed: the token is for this worker alone.
            async with self._http.request(
                method, url, headers=headers, data=content, allow_redirects=False
            ) as response:
                body = await _bounded(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WorkerUnreachable(f"{address}: {error!r}") from error
        if response.status >= 300 and response.status != 304:
            raise WorkerError(f"{address}: {method} {route} answered {response.status}: {body[:200]!r}")
        return response, body


def _clock(response: aiohttp.ClientResponse) -> float:
    """The clock of a worker whose report is unchanged. Raises BadReport."""
    text = response.headers.get(Header.clock_seconds, "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise BadReport(f"{Header.clock_seconds}: {text[:40]!r} is no clock")
    return seconds


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """A body of at most MAX_REPORT_BYTES; the rest is not even read."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_REPORT_BYTES:
            raise BadReport(f"the report has more than {MAX_REPORT_BYTES} bytes")
    return bytes(body)


def read_report(body: bytes) -> Report:
    """Checks everything that the rest of the operator relies on. Raises BadReport that names the field."""
    if len(body) > MAX_REPORT_BYTES:
        raise BadReport(f"the report has {len(body)} bytes, at most {MAX_REPORT_BYTES} are read")
    try:
        report = Report.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadReport(f"{'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}") from error
    if abs(report.contract_version - CONTRACT_VERSION) > 1:
        raise BadReport(f"contract_version: {report.contract_version}, this operator speaks {CONTRACT_VERSION}")
    bad = None if _counts_alone(report) else next((found for found in numbers(report) if not _is_count(found[1])), None)
    if bad is not None:
        raise BadReport(f"{bad[0]}: {bad[1]} is no count")
    for index, cell in enumerate(report.steps):
        lengths = (len(cell.x), len(cell.xt), len(cell.xx))
        if lengths != (len(FEATURES), len(FEATURES), _TRIANGLE):
            raise BadReport(f"steps.{index}: moments of lengths {lengths} do not fit {len(FEATURES)} features")
    return report


def _counts_alone(report: Report) -> bool:
    """Whether every number is a count for sure: all together, for a report has thousands and ten thousand workers send
    one a minute. Paths are made where it is in doubt; the sum finds what compares with nothing."""
    found: list[float] = []
    _gather(report, found)
    return min(found) >= 0 and _is_count(max(found)) and math.isfinite(sum(found))


def _gather(value: BaseModel, found: list[float]) -> None:
    for item in vars(value).values():
        if isinstance(item, BaseModel):
            _gather(item, found)
        elif isinstance(item, tuple) and item and isinstance(item[0], BaseModel):
            for part in item:
                _gather(part, found)
        elif isinstance(item, tuple):
            found += item
        elif isinstance(item, (int, float)):
            found.append(item)


def _is_count(number: float) -> bool:
    """Not negative, not infinite, and neither a whole number that no float can hold."""
    return 0 <= number <= sys.float_info.max


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a report with its path."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from numbers(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}.{index}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value
